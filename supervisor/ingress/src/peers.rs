//! Who requests come from, and which peers of Unix sockets are let in.

use std::io;
use std::sync::Arc;

use hyper::http::Extensions;
use tokio::net::{UnixListener, UnixStream};

use super::site::Site;
use shadowslice_datapath::peer::{Guard, Peer};

/// The other end of a connection, and as what it may address this one.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    pub(super) peer: Arc<Peer>,
    pub(super) site: Site,
}

/// The next peer that may connect; others find their connections closed.
pub(super) async fn accept(
    listener: &UnixListener,
    guard: &Guard,
    path: &str,
) -> io::Result<(UnixStream, Caller)> {
    loop {
        let (stream, _) = listener.accept().await?;
        // A stream that does not say whose it is is nobody's.
        let Ok(peer) = Peer::of_unix(&stream) else { continue };
        if guard.lets(&peer, "connect", path) {
            return Ok((stream, Caller { peer: Arc::new(peer), site: Site::Unix }));
        }
    }
}

/// Who a request comes from.
pub(super) fn of(extensions: &Extensions) -> &Arc<Peer> {
    extensions.get().expect("both protocols note it in a request before they look at it")
}
