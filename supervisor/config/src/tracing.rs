//! Reads the key `tracing`.

use http::Uri;

use super::reader::Fields;
use super::types::TracingConfig;
use super::units;

const PORT: u16 = 4317;

/// Reads the tracing settings. Returns `None` if the document does not have the key.
pub(super) fn tracing(root: &Fields<'_>) -> Option<TracingConfig> {
    root.get("tracing")?;
    let fields = root.section("tracing");
    let sample = fields.read("sample", |value| value.parsed(units::sample));
    let service = fields.read("service", |value| value.text().map(str::to_owned));
    let otlp = fields
        .required("otlp", &format!("give the collector's address, for example `http://127.0.0.1:{PORT}`"))?;
    Some(TracingConfig { otlp: otlp.parsed(collector)?, sample, service })
}

/// Parses the address of a collector, and returns it as `http://HOST:PORT`. Adds the default port
/// if the address has none.
fn collector(text: &str) -> Result<String, String> {
    let unknown = || {
        format!(
            "invalid collector address `{text}`; use for example `http://127.0.0.1:4317` or \
             `http://collector:4317`"
        )
    };
    let uri: Uri = text.parse().map_err(|_| unknown())?;
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => {
            return Err(format!(
                "`{text}` needs TLS, which is not supported; send to a collector on this host or in this network \
                 with `http://`, and let that collector forward with TLS"
            ));
        }
        _ => return Err(unknown()),
    }
    let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(unknown)?;
    let authority = uri.authority().ok_or_else(unknown)?.as_str();
    let port = match authority.strip_prefix(host).ok_or_else(unknown)? {
        "" => PORT,
        port => {
            uri.port_u16().filter(|number| *number > 0 && port == format!(":{number}")).ok_or_else(unknown)?
        }
    };
    match uri.path_and_query().map_or("/", |path| path.as_str()) {
        "" | "/" => Ok(format!("http://{host}:{port}")),
        _ => Err(format!(
            "`{text}` has a path, but OTLP over gRPC has none; remove everything after the port (the path \
             /v1/traces belongs to OTLP over HTTP, which is not supported)"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_the_port_filled_in() {
        for (text, address) in [
            ("http://127.0.0.1:4317", "http://127.0.0.1:4317"),
            ("http://[::1]:1/", "http://[::1]:1"),
            ("http://otel-collector.monitoring", "http://otel-collector.monitoring:4317"),
            ("HTTP://c:65535", "http://c:65535"),
        ] {
            assert_eq!(collector(text), Ok(address.to_owned()), "{text}");
            assert_eq!(collector(address), Ok(address.to_owned()), "{address}");
        }
    }

    #[test]
    fn invalid_addresses_are_refused() {
        for text in [
            "",
            "127.0.0.1:4317",
            "collector",
            "grpc://c:1",
            "http://",
            "http://:1",
            "http://c:",
            "http://c:0",
            "http://c:65536",
            "http://user@c:1",
            "http://a b:1",
            "unix:/x.sock",
        ] {
            assert!(collector(text).unwrap_err().contains("invalid collector address"), "{text}");
        }
        assert!(collector("https://c:4317").unwrap_err().contains("needs TLS"));
        for text in ["http://c:4318/v1/traces", "http://c/?x"] {
            assert!(collector(text).unwrap_err().contains("has a path"), "{text}");
        }
    }
}
