//! Guards decide which peers have the permission to connect, and which have the permission to send
//! commands.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::unistd::geteuid;
use shadowslice_config::{AllowedClients, Peers};

use super::{AuditOutcome, Peer, PeerSet, UnknownAccount, audit};
use crate::log_throttle::LogThrottle;

/// The shortest interval between two log messages about refused peers.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// The number of refusals, counted over all guards.
#[derive(Debug, Default)]
pub struct Refusals(AtomicU64);

impl Refusals {
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A guard that permits some peers to perform one kind of action.
#[derive(Debug)]
pub struct Guard {
    permitted: Permitted,
    refusals: Arc<Refusals>,
    throttle: LogThrottle,
}

#[derive(Debug)]
enum Permitted {
    Nobody,
    Everybody,
    /// The listed peers, root, and the user of this process.
    Only(PeerSet),
}

impl Guard {
    fn new(permitted: Permitted, refusals: Arc<Refusals>) -> Self {
        Self { permitted, refusals, throttle: LogThrottle::new(LOG_INTERVAL) }
    }

    pub fn nobody() -> Self {
        Self::new(Permitted::Nobody, Arc::default())
    }

    pub fn everybody() -> Self {
        Self::new(Permitted::Everybody, Arc::default())
    }

    /// Creates a guard that permits nobody. The guard only counts refusals that other code reports.
    pub fn refusing(refusals: &Arc<Refusals>) -> Self {
        Self::new(Permitted::Nobody, Arc::clone(refusals))
    }

    /// Creates a guard for these peers. This call may take long, because it looks up the names.
    pub fn only(peers: &Peers, refusals: &Arc<Refusals>) -> Result<Self, UnknownAccount> {
        Ok(Self::new(Permitted::Only(PeerSet::look_up(peers)?), Arc::clone(refusals)))
    }

    pub fn of(access: &AllowedClients, refusals: &Arc<Refusals>) -> Result<Self, UnknownAccount> {
        match access {
            AllowedClients::Nobody => Ok(Self::nobody()),
            AllowedClients::Everybody => Ok(Self::everybody()),
            AllowedClients::Only(peers) => Self::only(peers, refusals),
        }
    }

    /// Returns whether the guard permits any peer.
    pub fn permits_any(&self) -> bool {
        !matches!(self.permitted, Permitted::Nobody)
    }

    /// Returns whether `peer` has the permission for `action`. If not, counts the refusal, and logs
    /// at most one refusal per `LOG_INTERVAL`. A guard that permits nobody does not count or log
    /// refusals.
    pub fn permits(&self, peer: &Peer, action: &str, on: &str) -> bool {
        let is_permitted = match (&self.permitted, peer) {
            (Permitted::Nobody, _) => return false,
            (Permitted::Everybody, _) => true,
            (Permitted::Only(listed), Peer::Tcp { .. }) => listed.contains(peer),
            (Permitted::Only(listed), Peer::Unix { uid, .. }) => {
                *uid == 0 || *uid == geteuid().as_raw() || listed.contains(peer)
            }
        };
        if !is_permitted {
            self.refuse(peer, action, on);
        }
        is_permitted
    }

    /// Counts a refusal. Logs it unless another refusal was logged within the last `LOG_INTERVAL`.
    pub fn refuse(&self, peer: &Peer, action: &str, on: &str) {
        self.refusals.0.fetch_add(1, Ordering::Relaxed);
        if self.throttle.is_due() {
            audit(peer, action, on, AuditOutcome::Denied);
        }
    }
}

#[cfg(test)]
mod tests {
    use shadowslice_config::Account;

    use super::*;

    fn unix(uid: u32, groups: &[u32]) -> Peer {
        Peer::Unix { uid, groups: groups.to_vec(), pid: 1 }
    }

    #[test]
    fn users_and_groups_are_permitted_and_nobody_else_is() {
        let peers = Peers {
            users: vec![Account::Id(70_001)],
            groups: vec![Account::Id(70_002)],
            clients: vec!["ci".to_owned()],
        };
        let refusals = Arc::default();
        let guard = Guard::only(&peers, &refusals).unwrap();
        let permits = |peer| guard.permits(&peer, "connect", "x.sock");
        assert!(
            permits(unix(70_001, &[])) && permits(unix(70_009, &[5, 70_002])),
            "a user; a member of the group"
        );
        assert!(permits(unix(0, &[])) && permits(unix(geteuid().as_raw(), &[])), "root and this user always");
        assert!(!permits(unix(70_002, &[70_001])), "a user's number is not a group's");
        let tcp = |names: &[&str]| Peer::Tcp {
            address: ([127, 0, 0, 1], 9).into(),
            names: names.iter().map(ToString::to_string).collect(),
        };
        assert!(!permits(tcp(&[])), "a TCP connection has no name by itself");
        assert!(permits(tcp(&["else", "ci"])) && !permits(tcp(&["c", "70001"])));
        assert_eq!(refusals.count(), 3);
        assert!(!Guard::nobody().permits(&unix(0, &[]), "load", "m"));
        assert!(Guard::everybody().permits(&unix(70_009, &[]), "load", "m"));
    }

    #[test]
    fn names_are_looked_up() {
        let named = |name: &str| Peers { users: vec![Account::Name(name.into())], ..Peers::default() };
        Guard::only(&named("root"), &Arc::default()).unwrap();
        let unknown = Guard::only(&named("no such user"), &Arc::default()).unwrap_err();
        assert!(unknown.to_string().starts_with("the user \"no such user\""), "{unknown}");
    }
}
