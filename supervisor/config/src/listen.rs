//! The sockets.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use super::peers;
use super::reader::{Fields, Value};
use super::settings::{CONTROL_SOCKET, PRIVATE};
use super::types::{Address, Listen, Listener};

/// In bytes: 108 with the closing NUL.
pub(super) const MAX_SOCKET_PATH: usize = 107;

const MAX_LISTENERS: usize = 64;

/// A socket that is in use, and the setting that uses it.
struct Taken<'a> {
    address: Address,
    by: String,
    /// `None` for a default.
    value: Option<Value<'a>>,
}

/// No two sockets may be the same.
pub(super) fn listen(root: &Fields<'_>, run_dir: &Path) -> Listen {
    let fields = root.section("listen", &["http", "grpc", "metrics"]);
    let ours =
        [(CONTROL_SOCKET, "the supervisor's control socket"), (PRIVATE, "the supervisor's own folder")];
    let ours = ours.map(|(name, by)| (Address::Unix(run_dir.join(name)), by.to_owned()));
    let mut taken: Vec<_> =
        ours.into_iter().map(|(address, by)| Taken { address, by, value: None }).collect();
    let http = listeners(&fields, "http", &["unix:http.sock", "127.0.0.1:8000"], run_dir, &mut taken);
    let grpc = listeners(&fields, "grpc", &["unix:grpc.sock", "127.0.0.1:8001"], run_dir, &mut taken);
    let metrics = listeners(&fields, "metrics", &["127.0.0.1:8002"], run_dir, &mut taken);
    report_clashes(&taken);
    let is_none = |key| fields.get(key).is_some_and(|list| list.is_list() && list.items().is_empty());
    if is_none("http") && is_none("grpc") {
        fields.fault("http", "neither http nor grpc has an address, so no client could come; give one");
    }
    Listen { http, grpc, metrics }
}

fn listeners<'a>(
    fields: &Fields<'a>,
    key: &'static str,
    default: &[&str],
    run_dir: &Path,
    taken: &mut Vec<Taken<'a>>,
) -> Vec<Listener> {
    let Some(list) = fields.get(key) else {
        let parsed = default.iter().filter_map(|text| address(text, run_dir).ok());
        let addresses: Vec<_> = parsed.collect();
        let by = format!("listen.{key}, by default");
        taken.extend(addresses.iter().map(|address| Taken {
            address: address.clone(),
            by: by.clone(),
            value: None,
        }));
        return addresses.into_iter().map(plain).collect();
    };
    let Some(items) = list.items_up_to(MAX_LISTENERS, "listeners") else { return Vec::new() };
    let mut listeners = Vec::new();
    for item in items {
        if let Some(listener) = listener(&item, run_dir) {
            let by = format!("{} in line {}", item.path(), item.line());
            taken.push(Taken { address: listener.address.clone(), by, value: Some(item) });
            listeners.push(listener);
        }
    }
    listeners
}

fn plain(address: Address) -> Listener {
    Listener { address, mode: None, group: None, peers: None }
}

fn listener(item: &Value<'_>, run_dir: &Path) -> Option<Listener> {
    if item.is_scalar() {
        let address = item.parsed(|text| address(text, run_dir))?;
        return Some(plain(address));
    }
    let fields = item.fields(&["address", "mode", "group", "users", "groups"]);
    let written = fields.required("address", "give `unix:x.sock` or `127.0.0.1:8000`, say")?;
    let address = written.parsed(|text| address(text, run_dir));
    if matches!(address, Some(Address::Tcp(_))) {
        for key in ["mode", "group"] {
            fields.forbidden(key, "only Unix sockets have a mode and a group; remove this");
        }
        for key in ["users", "groups"] {
            fields.forbidden(key, "only Unix sockets say who connects; remove this");
        }
    }
    let mode = fields.get("mode").and_then(|value| file_mode(&value));
    let group = fields.get("group").and_then(|value| value.text()).map(str::to_owned);
    let peers = peers::peers(&fields);
    address.map(|address| Listener { address, mode, group, peers })
}

fn file_mode(value: &Value<'_>) -> Option<u32> {
    let text = value.text()?;
    if value.is_plain() {
        value.fault(format!(
            "without quotes YAML reads {text} as a decimal number; write an octal mode in quotes, such as \"0660\""
        ));
        return None;
    }
    let is_octal = matches!(text.len(), 3 | 4) && text.bytes().all(|b| matches!(b, b'0'..=b'7'));
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| is_octal && *mode <= 0o777);
    if mode.is_none() {
        value.fault(format!(
            "`{text}` is not a file mode; write three octal digits behind a 0, such as \"0660\""
        ));
    }
    mode
}

fn address(text: &str, run_dir: &Path) -> Result<Address, String> {
    let Some(path) = text.strip_prefix("unix:") else {
        return text.parse().map(Address::Tcp).map_err(|_| {
            format!("`{text}` is not an address; write `unix:x.sock`, `127.0.0.1:8000` or `[::1]:8000` (an IP address, no host name)")
        });
    };
    if path.is_empty() || path.ends_with('/') {
        return Err("`unix:` needs the socket's path, such as `unix:http.sock`".to_owned());
    }
    // Equal paths may be written in different ways, such as with `./`.
    let path: PathBuf = run_dir.join(path).components().collect();
    // A run directory that is itself too long is its own fault.
    let run_dir_fits = run_dir.join(CONTROL_SOCKET).as_os_str().len() <= MAX_SOCKET_PATH;
    let length = path.as_os_str().len();
    if length > MAX_SOCKET_PATH && (run_dir_fits || !path.starts_with(run_dir)) {
        let path = path.display();
        return Err(format!(
            "too long for a Unix socket: {path} has {length} bytes and {MAX_SOCKET_PATH} fit; shorten it or run_dir"
        ));
    }
    Ok(Address::Unix(path))
}

fn report_clashes(taken: &[Taken<'_>]) {
    for (index, second) in taken.iter().enumerate() {
        let Some(first) = taken[..index].iter().find(|first| clash(&first.address, &second.address)) else {
            continue;
        };
        match (&second.value, &first.value) {
            (Some(value), _) => value.fault(clash_text(first)),
            (None, Some(value)) => value.fault(clash_text(second)),
            (None, None) => {}
        }
    }
}

fn clash_text(other: &Taken<'_>) -> String {
    format!("the address is taken by {}; give each its own", other.by)
}

fn clash(first: &Address, second: &Address) -> bool {
    match (first, second) {
        (Address::Unix(first), Address::Unix(second)) => first == second,
        (Address::Tcp(first), Address::Tcp(second)) => clash_tcp(first, second),
        _ => false,
    }
}

/// Port 0 is any free port. `0.0.0.0` takes the port on all IPv4 addresses, `[::]` on all.
fn clash_tcp(first: &SocketAddr, second: &SocketAddr) -> bool {
    let (a, b) = (first.ip().to_canonical(), second.ip().to_canonical());
    let covers = |wide: IpAddr, other: IpAddr| wide.is_unspecified() && (wide.is_ipv6() || other.is_ipv4());
    first.port() == second.port() && first.port() != 0 && (a == b || covers(a, b) || covers(b, a))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_clash_with_what_they_cover() {
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
