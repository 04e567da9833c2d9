//! Whose request it is that a browser sends for a page.
//!
//! A page of any site may have the browsers of its readers ask servers on their own hosts. Such a
//! request has the page's site in `Origin`. A site whose name comes to mean 127.0.0.1 (DNS
//! rebinding) is of one origin with that server, but then its name stands where the server's should,
//! in `Host` or `:authority`. No page has to do with models, so that both are refused.

use std::net::{IpAddr, SocketAddr};

use hyper::header::{HOST, HeaderValue, ORIGIN};
use hyper::http::uri::Authority;
use hyper::{HeaderMap, Uri};

use crate::admission::request_error::RequestError;
use crate::tensors::check::Clipped;

/// What a listener may be called by those who ask it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Site {
    /// Of a Unix socket, which no browser reaches.
    Unix,
    /// Of a TCP listener on a loopback address: `localhost` or such an address, with any port.
    Loopback,
    /// Of a TCP listener for other hosts, which know it by names that only they know.
    Network,
}

impl Site {
    pub(crate) fn of_tcp(listener: SocketAddr) -> Self {
        if is_loopback(listener.ip()) { Self::Loopback } else { Self::Network }
    }

    pub(crate) fn check(self, uri: &Uri, headers: &HeaderMap) -> Result<(), RequestError> {
        if self == Self::Unix {
            return Ok(());
        }
        let names = || {
            // HTTP/2 has it in the URI.
            let authority = uri.authority().map(|authority| authority.as_str().as_bytes());
            headers.get_all(HOST).iter().map(HeaderValue::as_bytes).chain(authority)
        };
        if self == Self::Loopback
            && let Some(name) = names().find(|name| !is_local(name))
        {
            let name = String::from_utf8_lossy(name);
            let why = "send requests to this server as localhost or 127.0.0.1; a proxy must use one of these names, too";
            return Err(RequestError::Forbidden(format!("'{}': {why}", Clipped(&name))));
        }
        for origin in headers.get_all(ORIGIN) {
            let site = origin.to_str().ok().and_then(|origin| Some(origin.split_once("://")?.1.as_bytes()));
            let own = |site: &[u8]| names().any(|name| name.eq_ignore_ascii_case(site));
            if !site.is_some_and(own) {
                let why = "pages of other sites may not send requests to this server";
                let origin = String::from_utf8_lossy(origin.as_bytes());
                return Err(RequestError::Forbidden(format!("Origin '{}': {why}", Clipped(&origin))));
            }
        }
        Ok(())
    }
}

pub(crate) fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

fn is_local(name: &[u8]) -> bool {
    is_usual(name) || means_loopback(name)
}

/// Returns whether a client asks by one of the two names that nearly all use, without parsing it.
fn is_usual(name: &[u8]) -> bool {
    let port = name.strip_prefix(b"127.0.0.1").or_else(|| name.strip_prefix(b"localhost"));
    match port {
        Some([]) => true,
        Some([b':', digits @ ..]) => digits.iter().all(u8::is_ascii_digit),
        _ => false,
    }
}

fn means_loopback(name: &[u8]) -> bool {
    let Ok(authority) = Authority::try_from(name) else { return false };
    let host = authority.host();
    let ip = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host).parse();
    host.eq_ignore_ascii_case("localhost") || ip.is_ok_and(is_loopback)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: Site = Site::Loopback;

    fn asked(site: Site, uri: &str, headers: &[(hyper::header::HeaderName, &str)]) -> Result<(), String> {
        let headers =
            headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap()));
        let mut all = HeaderMap::new();
        headers.for_each(|(name, value)| {
            all.append(name, value);
        });
        site.check(&uri.parse().unwrap(), &all).map_err(|refused| refused.to_string())
    }

    #[test]
    fn a_loopback_listener_is_called_by_its_names_only() {
        for name in
            ["localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:1", "127.0.1.1", "[::1]", "[::1]:8000"]
        {
            assert_eq!(asked(LOCAL, "/v2", &[(HOST, name)]), Ok(()), "{name}");
            assert_eq!(asked(LOCAL, &format!("http://{name}/v2"), &[]), Ok(()), "{name}");
        }
        for name in [
            "evil.example",
            "localhost.evil.example:8000",
            "evil.example#localhost",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "0.0.0.0:8000",
            "localhost@evil.example",
            "",
            ":8000",
            "a b",
        ] {
            assert!(asked(LOCAL, "/v2", &[(HOST, name)]).is_err(), "{name}");
            assert!(asked(LOCAL, "/v2", &[(HOST, "localhost"), (HOST, name)]).is_err(), "{name}");
            assert_eq!(asked(Site::Network, "/v2", &[(HOST, name)]), Ok(()), "{name}");
            assert_eq!(asked(Site::Unix, "/v2", &[(HOST, name)]), Ok(()), "{name}");
        }
        assert!(asked(LOCAL, "http://evil.example/v2", &[(HOST, "localhost")]).is_err());
        assert_eq!(asked(LOCAL, "/v2", &[]), Ok(()), "every browser says a host");
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        for site in [Site::Loopback, Site::Network] {
            let page = |origin| asked(site, "/v2", &[(HOST, "localhost:8000"), (ORIGIN, origin)]);
            assert_eq!(page("http://localhost:8000"), Ok(()));
            for other in ["http://evil.example", "null", "http://localhost:8001", "http://localhost", ""] {
                assert!(page(other).unwrap_err().contains("other sites"), "{other}");
            }
        }
        assert_eq!(asked(Site::Unix, "/v2", &[(HOST, "x"), (ORIGIN, "http://evil.example")]), Ok(()));
    }

    #[test]
    fn addresses_that_mean_loopback_are_loopback() {
        for address in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert_eq!(Site::of_tcp(address.parse().unwrap()), Site::Loopback, "{address}");
        }
        for address in ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "[2001:db8::1]:1"] {
            assert_eq!(Site::of_tcp(address.parse().unwrap()), Site::Network, "{address}");
        }
    }
}
