//! Who may connect, or may do what changes something.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::unistd::{Group, User, geteuid};
use parking_lot::Mutex;
use shadowslice_config::{Account, AllowedClients, Peers};

use super::{Outcome, Peer, audit};

/// The log is told of peers that a guard refuses this often at most.
const QUIET: Duration = Duration::from_secs(1);

/// How many peers were refused, over all guards.
#[derive(Debug, Default)]
pub struct Refusals(AtomicU64);

impl Refusals {
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Lets some peers do one kind of thing.
#[derive(Debug)]
pub struct Guard {
    permitted: Permitted,
    refusals: Arc<Refusals>,
    /// When the log was last told.
    said: Mutex<Option<Instant>>,
}

#[derive(Debug)]
enum Permitted {
    Nobody,
    Everybody,
    /// Besides root and this process's user.
    Only {
        users: Vec<u32>,
        groups: Vec<u32>,
        clients: Vec<String>,
    },
}

#[derive(Debug, thiserror::Error)]
#[error(
    "{kind} {name:?}, which the configuration lets in, is not known here; give one of this host, or a number"
)]
pub struct UnknownAccount {
    kind: &'static str,
    name: String,
    #[source]
    source: Option<io::Error>,
}

impl Guard {
    fn new(permitted: Permitted, refusals: Arc<Refusals>) -> Self {
        Self { permitted, refusals, said: Mutex::default() }
    }

    pub fn nobody() -> Self {
        Self::new(Permitted::Nobody, Arc::default())
    }

    pub fn everybody() -> Self {
        Self::new(Permitted::Everybody, Arc::default())
    }

    /// For refusals that are decided elsewhere.
    pub fn counting(refusals: &Arc<Refusals>) -> Self {
        Self::new(Permitted::Nobody, Arc::clone(refusals))
    }

    /// Looks names up, which may take long.
    pub fn only(peers: &Peers, refusals: &Arc<Refusals>) -> Result<Self, UnknownAccount> {
        let users =
            ids("the user", &peers.users, |name| Ok(User::from_name(name)?.map(|user| user.uid.as_raw())))?;
        let groups = ids("the group", &peers.groups, |name| {
            Ok(Group::from_name(name)?.map(|group| group.gid.as_raw()))
        })?;
        let clients = peers.clients.clone();
        Ok(Self::new(Permitted::Only { users, groups, clients }, Arc::clone(refusals)))
    }

    pub fn of(access: &AllowedClients, refusals: &Arc<Refusals>) -> Result<Self, UnknownAccount> {
        match access {
            AllowedClients::Nobody => Ok(Self::nobody()),
            AllowedClients::Everybody => Ok(Self::everybody()),
            AllowedClients::Only(peers) => Self::only(peers, refusals),
        }
    }

    /// Whether there is anybody to let in.
    pub fn is_open(&self) -> bool {
        !matches!(self.permitted, Permitted::Nobody)
    }

    /// A refused peer is counted, and the log says so, though not of each in a crowd.
    pub fn lets(&self, peer: &Peer, action: &str, on: &str) -> bool {
        let may = match (&self.permitted, peer) {
            (Permitted::Nobody, _) => return false,
            (Permitted::Everybody, _) => true,
            (Permitted::Only { clients, .. }, Peer::Tcp { names, .. }) => {
                names.iter().any(|name| clients.contains(name))
            }
            (Permitted::Only { users, groups, .. }, Peer::Unix { uid, groups: its, .. }) => {
                *uid == 0
                    || *uid == geteuid().as_raw()
                    || users.contains(uid)
                    || its.iter().any(|group| groups.contains(group))
            }
        };
        if !may {
            self.refuse(peer, action, on);
        }
        may
    }

    /// Counts it, and tells the log.
    pub fn refuse(&self, peer: &Peer, action: &str, on: &str) {
        self.refusals.0.fetch_add(1, Ordering::Relaxed);
        let now = Instant::now();
        let due = {
            let mut said = self.said.lock();
            let due = said.is_none_or(|said| now.duration_since(said) >= QUIET);
            *said = if due { Some(now) } else { *said };
            due
        };
        if due {
            audit(peer, action, on, Outcome::Denied);
        }
    }
}

fn ids(
    kind: &'static str,
    accounts: &[Account],
    known: impl Fn(&str) -> Result<Option<u32>, Errno>,
) -> Result<Vec<u32>, UnknownAccount> {
    let id = |account: &Account| match account {
        Account::Id(id) => Ok(*id),
        Account::Name(name) => {
            let unknown = |source| UnknownAccount { kind, name: name.clone(), source };
            known(name).map_err(|errno| unknown(Some(errno.into())))?.ok_or_else(|| unknown(None))
        }
    };
    accounts.iter().map(id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unix(uid: u32, groups: &[u32]) -> Peer {
        Peer::Unix { uid, groups: groups.to_vec(), pid: 1 }
    }

    #[test]
    fn users_and_groups_are_let_in_and_nobody_else_is() {
        let peers = Peers {
            users: vec![Account::Id(70_001)],
            groups: vec![Account::Id(70_002)],
            clients: vec!["ci".to_owned()],
        };
        let refusals = Arc::default();
        let guard = Guard::only(&peers, &refusals).unwrap();
        let lets = |peer| guard.lets(&peer, "connect", "x.sock");
        assert!(lets(unix(70_001, &[])) && lets(unix(70_009, &[5, 70_002])), "a user; a member of the group");
        assert!(lets(unix(0, &[])) && lets(unix(geteuid().as_raw(), &[])), "root and this user always");
        assert!(!lets(unix(70_002, &[70_001])), "a user's number is no group's");
        let tcp = |names: &[&str]| Peer::Tcp {
            address: ([127, 0, 0, 1], 9).into(),
            names: names.iter().map(ToString::to_string).collect(),
        };
        assert!(!lets(tcp(&[])), "TCP by itself does not say who it is");
        assert!(lets(tcp(&["else", "ci"])) && !lets(tcp(&["c", "70001"])));
        assert_eq!(refusals.count(), 3);
        assert!(!Guard::nobody().lets(&unix(0, &[]), "load", "m"));
        assert!(Guard::everybody().lets(&unix(70_009, &[]), "load", "m"));
    }

    #[test]
    fn names_are_looked_up() {
        let named = |name: &str| Peers { users: vec![Account::Name(name.into())], ..Peers::default() };
        Guard::only(&named("root"), &Arc::default()).unwrap();
        let unknown = Guard::only(&named("no such user"), &Arc::default()).unwrap_err();
        assert!(unknown.to_string().starts_with("the user \"no such user\""), "{unknown}");
    }
}
