//! Reads the lists of users, groups and clients that have a permission.

use super::Context;
use super::host::AccountKind;
use super::reader::{Fields, Value};

/// The peers that have a permission. A client on a Unix socket is identified by its user and
/// groups, and a client on TCP by its name. The supervisor looks up users and groups when it
/// starts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Peers {
    /// The users in ascending order.
    pub users: Vec<Account>,
    /// The groups in ascending order.
    pub groups: Vec<Account>,
    /// The names of clients in tokens and certificates, in ascending order.
    pub clients: Vec<String>,
}

/// A user or a group, given by id or by name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Account {
    /// The numeric user id or group id.
    Id(u32),
    /// The user name or group name.
    Name(String),
}

/// The clients that have a permission.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum AllowedClients {
    /// No client has the permission.
    #[default]
    Nobody,
    /// Every client has the permission.
    Everybody,
    /// The listed clients have the permission.
    Only(Peers),
}

/// Reads the lists that the table allows in a map. Returns `None` if the map has none of them.
pub(super) fn peers(fields: &Fields<'_>, context: &Context<'_>) -> Option<Peers> {
    let list = |key, kind| fields.get(key).map(|value| accounts(&value, kind, context));
    let (users, groups) = (list("users", AccountKind::User), list("groups", AccountKind::Group));
    let clients = if fields.names().contains(&"clients") { fields.get("clients") } else { None };
    let clients = clients.map(|list| {
        let items = list.items();
        let mut names: Vec<_> = items.iter().filter_map(|item| item.text().map(str::to_owned)).collect();
        names.sort_unstable();
        names
    });
    let is_given = users.is_some() || groups.is_some() || clients.is_some();
    is_given.then(|| Peers {
        users: users.unwrap_or_default(),
        groups: groups.unwrap_or_default(),
        clients: clients.unwrap_or_default(),
    })
}

/// Reads a map with at least one list.
pub(super) fn listed(value: &Value<'_>, context: &Context<'_>) -> Option<Peers> {
    let fields = value.fields();
    let peers = peers(&fields, context);
    if peers.is_none() && value.is_map() {
        value.fault(format!("the map has no list; use one of {}", fields.names().join(", ")));
    }
    peers
}

/// Reads a map of lists, or a scalar. `plain` converts the scalar to true (everybody) or false
/// (nobody).
pub(super) fn access(
    value: &Value<'_>,
    context: &Context<'_>,
    plain: impl Fn(&Value<'_>) -> Option<bool>,
) -> Option<AllowedClients> {
    if value.is_map() {
        return listed(value, context).map(AllowedClients::Only);
    }
    plain(value).map(|yes| if yes { AllowedClients::Everybody } else { AllowedClients::Nobody })
}

fn accounts(list: &Value<'_>, kind: AccountKind, context: &Context<'_>) -> Vec<Account> {
    let items = list.items();
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
    if context.host.as_ref().is_some_and(|host| !host.has_account(kind, name)) {
        let kind = kind.name();
        context.host_fault(value, format!("{kind} `{name}` not found; create it, or correct the name"));
    }
}

fn account(item: &Value<'_>) -> Option<Account> {
    let text = item.text()?;
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(Account::Name(text.to_owned()));
    }
    // The kernel reserves the largest id for "no user".
    let id = text.parse().ok().filter(|id| *id != u32::MAX);
    if id.is_none() {
        item.fault(format!("invalid user or group id `{text}`; use at most {}", u32::MAX - 1));
    }
    id.map(Account::Id)
}
