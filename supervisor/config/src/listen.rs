//! Reads the key `listen`: the addresses of the supervisor's servers.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use super::host::AccountKind;
use super::reader::{Fields, Value};
use super::settings::{CONTROL_SOCKET, PRIVATE};
use super::types::{ListenConfig, Listener, SOCKET_MODE, Tls};
use super::{Context, absolute, peers, usable};

/// The longest path of a Unix socket, in bytes. The kernel allows 108 bytes including the final NUL
/// (`sun_path`).
pub(super) const MAX_SOCKET_PATH: usize = 107;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// An address that a setting uses.
struct UsedAddress {
    address: Address,
    /// The setting, as messages show it.
    by: String,
}

/// Reads the addresses. Records a fault if two addresses are equal.
pub(super) fn listen(root: &Fields<'_>, run_dir: &Path, context: &Context<'_>) -> ListenConfig {
    const KEYS: [&str; 3] = ["http", "grpc", "metrics"];
    let fields = root.section("listen");
    let in_run_dir = |name: &str| Address::Unix(run_dir.join(name));
    let default = |key| in_run_dir(&format!("{key}.sock"));
    let of_run_dir = |name, by: &str| UsedAddress { address: in_run_dir(name), by: by.to_owned() };
    let mut used = vec![
        of_run_dir(CONTROL_SOCKET, "the supervisor's control socket"),
        of_run_dir(PRIVATE, "the supervisor's own folder"),
    ];
    for key in KEYS.into_iter().filter(|key| fields.get(key).is_none()) {
        used.push(UsedAddress { address: default(key), by: format!("the default of listen.{key}") });
    }
    let mut listeners = |key| match fields.get(key) {
        Some(list) => {
            list.items().iter().filter_map(|item| listener(item, run_dir, &mut used, context)).collect()
        }
        None => vec![plain(default(key))],
    };
    let [http, grpc, metrics]: [Vec<Listener>; 3] = KEYS.map(&mut listeners);
    let is_empty = |key| fields.get(key).is_some_and(|list| list.is_list() && list.items().is_empty());
    if is_empty("http") && is_empty("grpc") {
        fields.fault("http", "neither http nor grpc has an address for clients; give at least one");
    }
    ListenConfig { http, grpc, metrics }
}

fn plain(address: Address) -> Listener {
    match address {
        Address::Unix(path) => Listener::Unix { path, mode: None, group: None, peers: None },
        Address::Tcp(address) => Listener::Tcp { address, tls: None, tokens: None },
    }
}

fn listener(
    item: &Value<'_>,
    run_dir: &Path,
    used: &mut Vec<UsedAddress>,
    context: &Context<'_>,
) -> Option<Listener> {
    let fields = (!item.is_scalar()).then(|| item.fields());
    let written = match &fields {
        None => item.clone(),
        Some(fields) => fields.required("address", "give for example `unix:x.sock` or `127.0.0.1:8000`")?,
    };
    let address = written.parsed(|text| address(text, run_dir))?;
    if let Some(UsedAddress { by, .. }) = used.iter().find(|other| clash(&other.address, &address)) {
        item.fault(format!("{by} has the same address; use different addresses"));
    }
    let by = format!("{} in line {}", item.path(), item.line());
    used.push(UsedAddress { address: address.clone(), by });
    Some(match (fields, address) {
        (None, address) => plain(address),
        (Some(fields), Address::Unix(path)) => unix(&fields, path, context),
        (Some(fields), Address::Tcp(address)) => tcp(&fields, address, context),
    })
}

fn unix(fields: &Fields<'_>, path: PathBuf, context: &Context<'_>) -> Listener {
    fields.forbid(
        &["tls", "tokens"],
        "only TCP addresses have this, and `users` and `groups` restrict a Unix socket",
    );
    Listener::Unix {
        path,
        mode: fields.optional("mode", file_mode).filter(|mode| *mode != SOCKET_MODE),
        group: fields.optional("group", |value| {
            let name = value.text()?;
            peers::check_known(value, AccountKind::Group, name, context);
            Some(name.to_owned())
        }),
        peers: peers::peers(fields, context),
    }
}

fn tcp(fields: &Fields<'_>, address: SocketAddr, context: &Context<'_>) -> Listener {
    fields.forbid(&["mode", "group"], "only Unix sockets have this");
    fields
        .forbid(&["users", "groups"], "only Unix sockets identify users, and `tokens` identify TCP clients");
    let tls = fields.optional("tls", |value| Some(tls(&value.fields(), context)));
    Listener::Tcp { address, tls, tokens: fields.optional("tokens", |value| file(value, context)) }
}

fn tls(fields: &Fields<'_>, context: &Context<'_>) -> Tls {
    let needed = |key| {
        let value = fields.required(key, "give a file in PEM format")?;
        file(&value, context)
    };
    // A missing file is a fault, so that the empty path has no effect.
    let (certificate, key) = (needed("certificate"), needed("key"));
    Tls {
        certificate: certificate.unwrap_or_default(),
        key: key.unwrap_or_default(),
        client_ca: fields.optional("client_ca", |value| file(value, context)),
    }
}

/// Reads the path of a file and returns the absolute path. The file must exist.
fn file(value: &Value<'_>, context: &Context<'_>) -> Option<PathBuf> {
    let path = context.path(value)?;
    if let Err(error) = usable(&path) {
        value.fault(format!("cannot use {}: {error}; correct the path or the file", path.display()));
    }
    Some(absolute(&path))
}

fn file_mode(value: &Value<'_>) -> Option<u32> {
    let text = value.text()?;
    // YAML reads a mode without quotes as a decimal number.
    let is_octal =
        !value.is_plain() && matches!(text.len(), 3 | 4) && text.bytes().all(|b| matches!(b, b'0'..=b'7'));
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| is_octal && *mode <= 0o777);
    if mode.is_none() {
        value.fault(format!("invalid file mode {text}; use an octal mode in quotes, for example \"0660\""));
    }
    mode
}

fn address(text: &str, run_dir: &Path) -> Result<Address, String> {
    let Some(path) = text.strip_prefix("unix:") else {
        return text.parse().map(Address::Tcp).map_err(|_| {
            format!(
                "invalid address `{text}`; use for example `unix:x.sock`, `127.0.0.1:8000` or `[::1]:8000` \
                 (an IP address, not a host name)"
            )
        });
    };
    if path.is_empty() || path.ends_with('/') {
        return Err("`unix:` needs the path of a socket; use for example `unix:http.sock`".to_owned());
    }
    // The same path may be written in different ways, for example with `./`.
    let path: PathBuf = run_dir.join(path).components().collect();
    let length = path.as_os_str().len();
    if length > MAX_SOCKET_PATH {
        let path = path.display();
        return Err(format!(
            "the path is too long for a Unix socket: {path} has {length} bytes, and at most {MAX_SOCKET_PATH} fit; \
             shorten the path or run_dir"
        ));
    }
    Ok(Address::Unix(path))
}

fn clash(first: &Address, second: &Address) -> bool {
    match (first, second) {
        (Address::Unix(first), Address::Unix(second)) => first == second,
        (Address::Tcp(first), Address::Tcp(second)) => clash_tcp(first, second),
        _ => false,
    }
}

/// Returns whether two TCP addresses conflict. Port 0 means any free port and never conflicts.
/// `0.0.0.0` takes the port on all IPv4 addresses, and `[::]` takes it on all addresses.
fn clash_tcp(first: &SocketAddr, second: &SocketAddr) -> bool {
    let (a, b) = (first.ip().to_canonical(), second.ip().to_canonical());
    let covers = |wide: IpAddr, other: IpAddr| wide.is_unspecified() && (wide.is_ipv6() || other.is_ipv4());
    first.port() == second.port() && first.port() != 0 && (a == b || covers(a, b) || covers(b, a))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_clash_with_the_addresses_that_they_cover() {
        let clash = |a: &str, b: &str| clash_tcp(&a.parse().unwrap(), &b.parse().unwrap());
        assert!(clash("127.0.0.1:80", "127.0.0.1:80"));
        assert!(clash("0.0.0.0:80", "127.0.0.1:80"));
        assert!(clash("127.0.0.1:80", "[::]:80"));
        assert!(clash("[::ffff:127.0.0.1]:80", "127.0.0.1:80"));
        assert!(!clash("0.0.0.0:80", "[::1]:80"));
        assert!(!clash("127.0.0.1:80", "127.0.0.2:80"));
        assert!(!clash("127.0.0.1:80", "127.0.0.1:81"));
        assert!(!clash("127.0.0.1:0", "127.0.0.1:0"), "any free port");
    }
}
