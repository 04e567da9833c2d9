//! Who may: users and groups of the host, and clients by name.

use std::fmt;

use super::Context;
use super::host::AccountKind;
use super::reader::{Fields, Value};
use super::render::quoted;

/// Of one list.
const MAX_ACCOUNTS: usize = 256;

/// Users and groups of Unix sockets' peers, and clients of TCP by names of their own. Users and
/// groups are looked up when the supervisor starts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Peers {
    pub users: Vec<Account>,
    pub groups: Vec<Account>,
    /// As tokens and certificates name them.
    pub clients: Vec<String>,
}

/// A user or a group, as it is written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Account {
    Id(u32),
    Name(String),
}

/// Which clients may do what changes something.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum AllowedClients {
    #[default]
    Nobody,
    Everybody,
    Only(Peers),
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => id.fmt(f),
            Self::Name(name) => f.write_str(&quoted(name)),
        }
    }
}

/// As the keys of a map in YAML.
impl fmt::Display for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list =
            |accounts: &[Account]| accounts.iter().map(Account::to_string).collect::<Vec<_>>().join(", ");
        write!(f, "users: [{}], groups: [{}]", list(&self.users), list(&self.groups))?;
        if self.clients.is_empty() {
            return Ok(());
        }
        let clients: Vec<_> = self.clients.iter().map(|name| quoted(name)).collect();
        write!(f, ", clients: [{}]", clients.join(", "))
    }
}

/// Of Unix sockets; `None` where neither list is written.
pub(super) fn peers(fields: &Fields<'_>, context: &Context<'_>) -> Option<Peers> {
    let list = |key, kind| fields.get(key).map(|value| accounts(&value, kind, context));
    match (list("users", AccountKind::User), list("groups", AccountKind::Group)) {
        (None, None) => None,
        (users, groups) => Some(Peers {
            users: users.unwrap_or_default(),
            groups: groups.unwrap_or_default(),
            clients: Vec::new(),
        }),
    }
}

/// A map with at least one of the lists.
pub(super) fn listed(value: &Value<'_>, context: &Context<'_>) -> Option<Peers> {
    let peers = peers(&value.fields(&["users", "groups"]), context);
    if peers.is_none() && value.is_map() {
        value.fault("names nobody; give `users`, `groups` or both");
    }
    peers
}

/// The same where clients may come over TCP, too.
fn listed_clients(value: &Value<'_>, context: &Context<'_>) -> Option<Peers> {
    let fields = value.fields(&["users", "groups", "clients"]);
    let (peers, clients) = (peers(&fields, context), fields.get("clients"));
    if peers.is_none() && clients.is_none() {
        value.fault("names nobody; give `users`, `groups` or `clients`");
        return None;
    }
    let items = clients.and_then(|list| list.items_up_to(MAX_ACCOUNTS, "names")).unwrap_or_default();
    let mut clients: Vec<_> = items.iter().filter_map(|item| item.text().map(str::to_owned)).collect();
    clients.sort_unstable();
    Some(Peers { clients, ..peers.unwrap_or_default() })
}

/// A map, or a word that `plain` reads as a yes or no to everybody.
pub(super) fn access(
    value: &Value<'_>,
    context: &Context<'_>,
    plain: impl FnOnce(&Value<'_>) -> Option<bool>,
) -> Option<AllowedClients> {
    if value.is_map() {
        return listed_clients(value, context).map(AllowedClients::Only);
    }
    plain(value).map(|yes| if yes { AllowedClients::Everybody } else { AllowedClients::Nobody })
}

fn accounts(list: &Value<'_>, kind: AccountKind, context: &Context<'_>) -> Vec<Account> {
    let items = list.items_up_to(MAX_ACCOUNTS, "names").unwrap_or_default();
    let known = |item: &Value<'_>, account: &Account| {
        if let Account::Name(name) = account {
            check_known(item, kind, name, context);
        }
    };
    let accounts = items.iter().filter_map(|item| account(item).inspect(|account| known(item, account)));
    let mut accounts: Vec<_> = accounts.collect();
    accounts.sort_unstable();
    accounts
}

pub(super) fn check_known(value: &Value<'_>, kind: AccountKind, name: &str, context: &Context<'_>) {
    if !context.host.has_account(kind, name) {
        let kind = kind.name();
        context.host_fault(value, format!("there is no {kind} `{name}`; make it, or correct the name"));
    }
}

fn account(item: &Value<'_>) -> Option<Account> {
    let text = item.text()?;
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(Account::Name(text.to_owned()));
    }
    // The largest number stands for no user at all.
    let id = text.parse().ok().filter(|id| *id != u32::MAX);
    if id.is_none() {
        item.fault(format!("`{text}` is no user's or group's number; the largest is {}", u32::MAX - 1));
    }
    id.map(Account::Id)
}
