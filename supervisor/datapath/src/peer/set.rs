//! Sets of peers, with the users and groups of this host.

use std::io;

use nix::errno::Errno;
use nix::unistd::{Group, User};
use shadowslice_config::{Account, Peers};

use super::Peer;

/// The peers that a configuration lists.
#[derive(Debug, Clone, Default)]
pub struct PeerSet {
    users: Vec<u32>,
    groups: Vec<u32>,
    clients: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
#[error(
    "{kind} {name:?} in the configuration does not exist on this host; correct the name, or give a number"
)]
pub struct UnknownAccount {
    kind: &'static str,
    name: String,
    #[source]
    source: Option<io::Error>,
}

impl PeerSet {
    /// Looks up the users and groups. This call may take long.
    ///
    /// # Errors
    ///
    /// Returns an error if the host does not have a user or group.
    pub fn look_up(peers: &Peers) -> Result<Self, UnknownAccount> {
        let groups = ids("the group", &peers.groups, |name| {
            Ok(Group::from_name(name)?.map(|group| group.gid.as_raw()))
        })?;
        let users = ids("the user", &peers.users, user)?;
        Ok(Self { users, groups, clients: peers.clients.clone() })
    }

    /// Returns the user and the client with this name. The host does not need to have the user.
    pub fn named(name: &str) -> Self {
        let users = user(name).ok().flatten().into_iter().collect();
        Self { users, groups: Vec::new(), clients: vec![name.to_owned()] }
    }

    /// Returns true if the peer, one of its groups or one of its names is listed.
    pub fn contains(&self, peer: &Peer) -> bool {
        match peer {
            Peer::Tcp { names, .. } => names.iter().any(|name| self.clients.contains(name)),
            Peer::Unix { uid, groups, .. } => {
                self.users.contains(uid) || groups.iter().any(|group| self.groups.contains(group))
            }
        }
    }
}

fn user(name: &str) -> Result<Option<u32>, Errno> {
    Ok(User::from_name(name)?.map(|user| user.uid.as_raw()))
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
