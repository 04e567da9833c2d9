//! Who requests come from, and which peers of Unix sockets are let in.

use std::io;
use std::sync::Arc;

use hyper::http::Extensions;
use hyper::{HeaderMap, Uri};
use tokio::net::{UnixListener, UnixStream};

use crate::admission::origin::Site;
use crate::admission::request_error::RequestError;
use crate::admission::tokens::Tokens;
use shadowslice_datapath::peer::{Guard, Peer};

/// The other end of a connection, and what is asked of its requests.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) peer: Arc<Peer>,
    pub(crate) site: Site,
    /// `None` if requests need none.
    pub(crate) tokens: Option<Tokens>,
}

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// What tells nothing, and is asked without a token: health, and the files of a page.
    Open,
    Guarded,
}

impl Caller {
    /// Who a request comes from; fails if it is not let in.
    pub(crate) fn identify(
        &self,
        uri: &Uri,
        headers: &HeaderMap,
        asked: Asked,
    ) -> Result<Arc<Peer>, RequestError> {
        self.site.check(uri, headers)?;
        let (Some(tokens), Asked::Guarded) = (&self.tokens, asked) else { return Ok(Arc::clone(&self.peer)) };
        let named =
            tokens.name(headers).inspect_err(|_| tokens.guard().refuse(&self.peer, "ask", uri.path()))?;
        let mut peer = Peer::clone(&self.peer);
        if let Peer::Tcp { names, .. } = &mut peer {
            names.push(named);
        }
        Ok(Arc::new(peer))
    }
}

/// The next peer that may connect; others find their connections closed.
pub(crate) async fn accept(
    listener: &UnixListener,
    guard: &Guard,
    path: &str,
) -> io::Result<(UnixStream, Caller)> {
    loop {
        let (stream, _) = listener.accept().await?;
        // A stream that does not say whose it is is nobody's.
        let Ok(peer) = Peer::of_unix(&stream) else { continue };
        if guard.permits(&peer, "connect", path) {
            return Ok((stream, Caller { peer: Arc::new(peer), site: Site::Unix, tokens: None }));
        }
    }
}

/// Who a request comes from.
pub(crate) fn of(extensions: &Extensions) -> &Arc<Peer> {
    extensions.get().expect("both protocols note it in a request before they look at it")
}
