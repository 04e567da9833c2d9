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

/// An address that a setting uses, and the name of this setting.
struct UsedAddress<'a> {
    address: Address,
    /// The name of the setting, as messages show it.
    by: String,
    /// The value in the document, or `None` for a default address.
    value: Option<Value<'a>>,
}

/// Reads the addresses. Records a fault if two addresses are equal.
pub(super) fn listen(root: &Fields<'_>, run_dir: &Path, context: &Context<'_>) -> ListenConfig {
    let fields = root.section("listen");
    let ours =
        [(CONTROL_SOCKET, "the supervisor's control socket"), (PRIVATE, "the supervisor's own folder")];
    let ours = ours.map(|(name, by)| (Address::Unix(run_dir.join(name)), by.to_owned()));
    let mut used: Vec<_> =
        ours.into_iter().map(|(address, by)| UsedAddress { address, by, value: None }).collect();
    let mut listeners = |key, default| listeners((&fields, key), default, run_dir, &mut used, context);
    let http = listeners("http", "http.sock");
    let grpc = listeners("grpc", "grpc.sock");
    let metrics = listeners("metrics", "metrics.sock");
    report_clashes(&used);
    let is_none = |key| fields.get(key).is_some_and(|list| list.is_list() && list.items().is_empty());
    if is_none("http") && is_none("grpc") {
        fields.fault("http", "neither http nor grpc has an address for clients; give at least one");
    }
    ListenConfig { http, grpc, metrics }
}

fn listeners<'a>(
    (fields, key): (&Fields<'a>, &'static str),
    default: &str,
    run_dir: &Path,
    used: &mut Vec<UsedAddress<'a>>,
    context: &Context<'_>,
) -> Vec<Listener> {
    let Some(list) = fields.get(key) else {
        let address = Address::Unix(run_dir.join(default));
        let by = format!("the default of listen.{key}");
        used.push(UsedAddress { address: address.clone(), by, value: None });
        return vec![plain(address)];
    };
    let Some(items) = list.limited_items("listeners") else { return Vec::new() };
    let mut listeners = Vec::new();
    for item in items {
        if let Some((address, listener)) = listener(&item, run_dir, context) {
            let by = format!("{} in line {}", item.path(), item.line());
            used.push(UsedAddress { address, by, value: Some(item) });
            listeners.push(listener);
        }
    }
    listeners
}

fn plain(address: Address) -> Listener {
    match address {
        Address::Unix(path) => Listener::Unix { path, mode: None, group: None, peers: None },
        Address::Tcp(address) => Listener::Tcp { address, tls: None, tokens: None },
    }
}

fn listener(item: &Value<'_>, run_dir: &Path, context: &Context<'_>) -> Option<(Address, Listener)> {
    if item.is_scalar() {
        let address = item.parsed(|text| address(text, run_dir))?;
        return Some((address.clone(), plain(address)));
    }
    let fields = item.fields();
    let written = fields.required("address", "give for example `unix:x.sock` or `127.0.0.1:8000`")?;
    let address = written.parsed(|text| address(text, run_dir))?;
    let listener = match address.clone() {
        Address::Unix(path) => unix(&fields, path, context),
        Address::Tcp(address) => tcp(&fields, address, context)?,
    };
    Some((address, listener))
}

fn group(value: &Value<'_>, context: &Context<'_>) -> Option<String> {
    let name = value.text()?;
    peers::check_known(value, AccountKind::Group, name, context);
    Some(name.to_owned())
}

fn unix(fields: &Fields<'_>, path: PathBuf, context: &Context<'_>) -> Listener {
    for key in ["tls", "tokens"] {
        fields.forbidden(key, "only TCP addresses have this; remove the key, or use `users` and `groups`");
    }
    Listener::Unix {
        path,
        mode: fields.optional("mode", file_mode).filter(|mode| *mode != SOCKET_MODE),
        group: fields.optional("group", |value| group(value, context)),
        peers: peers::peers(fields, context),
    }
}

fn tcp(fields: &Fields<'_>, address: SocketAddr, context: &Context<'_>) -> Option<Listener> {
    for key in ["mode", "group"] {
        fields.forbidden(key, "only Unix sockets have this; remove the key");
    }
    for key in ["users", "groups"] {
        fields.forbidden(key, "only Unix sockets identify users; remove the key, or use `tokens`");
    }
    let tls = match fields.get("tls") {
        Some(value) => Some(tls(&value, context)?),
        None => None,
    };
    let tokens = match fields.get("tokens") {
        Some(value) => Some(file(&value, context)?),
        None => None,
    };
    Some(Listener::Tcp { address, tls, tokens })
}

fn tls(value: &Value<'_>, context: &Context<'_>) -> Option<Tls> {
    let fields = value.fields();
    let needed =
        |key| fields.required(key, "give a file in PEM format").and_then(|value| file(&value, context));
    let (certificate, key) = (needed("certificate"), needed("key"));
    let client_ca = match fields.get("client_ca") {
        Some(value) => Some(file(&value, context)?),
        None => None,
    };
    Some(Tls { certificate: certificate?, key: key?, client_ca })
}

/// Reads the path of a file and returns the absolute path. The file must exist.
fn file(value: &Value<'_>, context: &Context<'_>) -> Option<PathBuf> {
    let path = context.resolve(value.text()?);
    if let Err(error) = usable(&path) {
        value.fault(format!("cannot use {}: {error}; correct the path or the file", path.display()));
        return None;
    }
    Some(absolute(&path))
}

fn file_mode(value: &Value<'_>) -> Option<u32> {
    let text = value.text()?;
    if value.is_plain() {
        value.fault(format!(
            "YAML reads {text} without quotes as a decimal number; use an octal mode in quotes, for example \"0660\""
        ));
        return None;
    }
    let is_octal = matches!(text.len(), 3 | 4) && text.bytes().all(|b| matches!(b, b'0'..=b'7'));
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| is_octal && *mode <= 0o777);
    if mode.is_none() {
        value.fault(format!(
            "invalid file mode `{text}`; use a 0 and three octal digits, for example \"0660\""
        ));
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
    // If the path of the run directory is itself too long, only `run_dir` gets a fault.
    let run_dir_fits = run_dir.join(CONTROL_SOCKET).as_os_str().len() <= MAX_SOCKET_PATH;
    let length = path.as_os_str().len();
    if length > MAX_SOCKET_PATH && (run_dir_fits || !path.starts_with(run_dir)) {
        let path = path.display();
        return Err(format!(
            "the path is too long for a Unix socket: {path} has {length} bytes, and at most {MAX_SOCKET_PATH} fit; \
             shorten the path or run_dir"
        ));
    }
    Ok(Address::Unix(path))
}

fn report_clashes(used: &[UsedAddress<'_>]) {
    for (index, second) in used.iter().enumerate() {
        let Some(first) = used[..index].iter().find(|first| clash(&first.address, &second.address)) else {
            continue;
        };
        match (&second.value, &first.value) {
            (Some(value), _) => value.fault(same_address(first)),
            (None, Some(value)) => value.fault(same_address(second)),
            (None, None) => {}
        }
    }
}

fn same_address(other: &UsedAddress<'_>) -> String {
    format!("{} has the same address; use different addresses", other.by)
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
