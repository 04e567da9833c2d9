//! The peers at the other end of connections, and the guards that check their permissions.

mod groups;
mod guard;
mod set;

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;

pub use guard::{Guard, Refusals};
pub use set::{PeerSet, UnknownAccount};

/// The longest name in an audit message, in bytes. The limit is necessary because clients choose
/// the names.
const MAX_NAME_BYTES: usize = 256;

/// A client at the other end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peer {
    /// The process that connected to a Unix socket. The fields are from the time of the connection.
    Unix {
        uid: u32,
        /// The primary and supplementary groups of the process.
        groups: Vec<u32>,
        /// The process id. It is 0 if the process is in another PID namespace.
        pid: i32,
    },
    Tcp {
        address: SocketAddr,
        /// The names in the client's certificate and token. The list is empty if the client has
        /// neither.
        names: Vec<String>,
    },
}

impl Peer {
    pub fn of_unix(socket: &impl AsFd) -> io::Result<Self> {
        let credentials = getsockopt(socket, PeerCredentials)?;
        let mut groups = groups::supplementary(socket.as_fd())?;
        groups.push(credentials.gid());
        Ok(Self::Unix { uid: credentials.uid(), groups, pid: credentials.pid() })
    }

    /// Returns this process, for actions that no client requested.
    pub fn own() -> Self {
        let (uid, pid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getpid().as_raw());
        Self::Unix { uid, groups: Vec::new(), pid }
    }
}

/// The result of an action that a peer requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuditOutcome<'a> {
    Done,
    Failed(&'a str),
    /// The peer does not have the permission.
    Denied,
}

impl<'a, T, E> From<&'a Result<T, E>> for AuditOutcome<'a>
where
    E: AsRef<str>,
{
    fn from(outcome: &'a Result<T, E>) -> Self {
        outcome.as_ref().map_or_else(|why| Self::Failed(why.as_ref()), |_| Self::Done)
    }
}

/// Writes an audit message about an action.
pub fn audit(by: &Peer, action: &str, on: &str, outcome: AuditOutcome<'_>) {
    let on = &on[..on.floor_char_boundary(MAX_NAME_BYTES)];
    let (uid, pid, address, client) = match by {
        Peer::Unix { uid, pid, .. } => (Some(uid), Some(pid), None, None),
        Peer::Tcp { address, names } => {
            let client = (!names.is_empty()).then(|| names.join(","));
            (None, None, Some(tracing::field::display(address)), client)
        }
    };
    let (outcome, why) = match outcome {
        AuditOutcome::Done => ("done", None),
        AuditOutcome::Failed(why) => ("failed", Some(why)),
        AuditOutcome::Denied => ("denied", None),
    };
    tracing::info!(target: "audit", action, on, uid, pid, address, client, outcome, why, "audit");
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_peer_has_the_groups_of_its_process() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let Peer::Unix { uid, groups, pid } = Peer::of_unix(&socket).unwrap() else {
            panic!("not a Unix peer")
        };
        assert_eq!(uid, nix::unistd::geteuid().as_raw());
        assert_eq!(pid, nix::unistd::getpid().as_raw());
        let mut own: Vec<_> = nix::unistd::getgroups().unwrap().iter().map(|group| group.as_raw()).collect();
        own.push(nix::unistd::getegid().as_raw());
        assert_eq!(groups, own);
    }
}
