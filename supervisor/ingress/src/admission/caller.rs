//! The clients that requests come from, and the peers that may connect to Unix sockets.

use std::io;
use std::sync::Arc;

use hyper::http::Extensions;
use hyper::http::request::Parts;
use hyper::{HeaderMap, Uri};
use shadowslice_datapath::access::AccessEntry;
use shadowslice_datapath::peer::{Guard, Peer};
use tokio::net::{UnixListener, UnixStream};

use super::origin::Origin;
use super::request_error::RequestError;
use super::tokens::Tokens;

/// The other end of a connection, and the conditions for its requests.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) peer: Arc<Peer>,
    pub(crate) origin: Origin,
    /// The tokens that are accepted, or `None` if requests need no token.
    pub(crate) tokens: Option<Tokens>,
}

/// The kind of resource that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resource {
    /// A resource without secrets, which needs no token: health, and the files of a page.
    Public,
    Protected,
}

impl Caller {
    /// Returns the client that sends a request. Fails if the client may not send it.
    pub(crate) fn identify(
        &self,
        uri: &Uri,
        headers: &HeaderMap,
        resource: Resource,
    ) -> Result<Arc<Peer>, RequestError> {
        self.origin.check(uri, headers)?;
        let (Some(tokens), Resource::Protected) = (&self.tokens, resource) else {
            return Ok(Arc::clone(&self.peer));
        };
        let named =
            tokens.name(headers).inspect_err(|_| tokens.guard().refuse(&self.peer, "ask", uri.path()))?;
        let mut peer = Peer::clone(&self.peer);
        if let Peer::Tcp { names, .. } = &mut peer {
            names.push(named);
        }
        Ok(Arc::new(peer))
    }

    /// Inserts the client into the extensions of its request. Fails if the client may not send it.
    pub(crate) fn identify_in(&self, head: &mut Parts, resource: Resource) -> Result<(), RequestError> {
        let peer = self.identify(&head.uri, &head.headers, resource)?;
        if let Some(entry) = head.extensions.get::<AccessEntry>() {
            entry.set_peer(&peer);
        }
        head.extensions.insert(peer);
        Ok(())
    }
}

/// Returns the next connection whose peer is permitted. Closes the connections of other peers.
pub(crate) async fn accept_permitted(
    listener: &UnixListener,
    guard: &Guard,
    path: &str,
) -> io::Result<(UnixStream, Caller)> {
    loop {
        let (stream, _) = listener.accept().await?;
        // A stream whose peer is unknown is refused.
        let Ok(peer) = Peer::of_unix(&stream) else { continue };
        if guard.permits(&peer, "connect", path) {
            return Ok((stream, Caller { peer: Arc::new(peer), origin: Origin::Unix, tokens: None }));
        }
    }
}

/// Returns the client that sent a request.
pub(crate) fn peer(extensions: &Extensions) -> &Arc<Peer> {
    extensions.get().expect("both protocols insert the peer into a request when they identify it")
}
