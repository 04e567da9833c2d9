//! Protection against requests that browsers send on behalf of web pages.
//!
//! A page of any site can make the browsers of its readers send requests to servers on their own
//! hosts. Such a request contains the page's origin in `Origin`. If the name of a site resolves to
//! 127.0.0.1 (DNS rebinding), the site has the same origin as this server, but then `Host` or
//! `:authority` contains the site's name. Pages never need models, so both are refused.

use std::net::{IpAddr, SocketAddr};

use hyper::header::{HOST, HeaderValue, ORIGIN};
use hyper::http::uri::Authority;
use hyper::{HeaderMap, Uri};

use super::clipped::Clipped;
use super::request_error::RequestError;

/// The names that clients may use for a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A Unix socket, which browsers cannot reach.
    Unix,
    /// A TCP listener on a loopback address. Its names are `localhost` and loopback addresses, with
    /// any port.
    Loopback,
    /// A TCP listener for other hosts, which may have any names.
    Network,
}

impl Origin {
    pub(crate) fn of_tcp(listener: SocketAddr) -> Self {
        if is_loopback(listener.ip()) { Self::Loopback } else { Self::Network }
    }

    pub(super) fn check(self, uri: &Uri, headers: &HeaderMap) -> Result<(), RequestError> {
        if self == Self::Unix {
            return Ok(());
        }
        let names = || {
            // HTTP/2 has the authority in the URI.
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
            let is_own = |site: &[u8]| names().any(|name| name.eq_ignore_ascii_case(site));
            if !site.is_some_and(is_own) {
                let why = "pages of other sites may not send requests to this server";
                let origin = String::from_utf8_lossy(origin.as_bytes());
                return Err(RequestError::Forbidden(format!("Origin '{}': {why}", Clipped(&origin))));
            }
        }
        Ok(())
    }
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Returns whether a name is `localhost` or a loopback address, with any port.
fn is_local(name: &[u8]) -> bool {
    let Ok(authority) = Authority::try_from(name) else { return false };
    let host = authority.host();
    let ip = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host).parse();
    host.eq_ignore_ascii_case("localhost") || ip.is_ok_and(is_loopback)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: Origin = Origin::Loopback;

    fn check(origin: Origin, uri: &str, headers: &[(hyper::header::HeaderName, &str)]) -> Result<(), String> {
        let headers =
            headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap()));
        let mut all = HeaderMap::new();
        headers.for_each(|(name, value)| {
            all.append(name, value);
        });
        origin.check(&uri.parse().unwrap(), &all).map_err(|refused| refused.to_string())
    }

    #[test]
    fn a_loopback_listener_is_called_by_its_names_only() {
        for name in
            ["localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:1", "127.0.1.1", "[::1]", "[::1]:8000"]
        {
            assert_eq!(check(LOCAL, "/v2", &[(HOST, name)]), Ok(()), "{name}");
            assert_eq!(check(LOCAL, &format!("http://{name}/v2"), &[]), Ok(()), "{name}");
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
            assert!(check(LOCAL, "/v2", &[(HOST, name)]).is_err(), "{name}");
            assert!(check(LOCAL, "/v2", &[(HOST, "localhost"), (HOST, name)]).is_err(), "{name}");
            assert_eq!(check(Origin::Network, "/v2", &[(HOST, name)]), Ok(()), "{name}");
            assert_eq!(check(Origin::Unix, "/v2", &[(HOST, name)]), Ok(()), "{name}");
        }
        assert!(check(LOCAL, "http://evil.example/v2", &[(HOST, "localhost")]).is_err());
        assert_eq!(check(LOCAL, "/v2", &[]), Ok(()), "every browser sends a host");
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        for origin in [Origin::Loopback, Origin::Network] {
            let page = |of_page| check(origin, "/v2", &[(HOST, "localhost:8000"), (ORIGIN, of_page)]);
            assert_eq!(page("http://localhost:8000"), Ok(()));
            for other in ["http://evil.example", "null", "http://localhost:8001", "http://localhost", ""] {
                assert!(page(other).unwrap_err().contains("other sites"), "{other}");
            }
        }
        assert_eq!(check(Origin::Unix, "/v2", &[(HOST, "x"), (ORIGIN, "http://evil.example")]), Ok(()));
    }

    #[test]
    fn addresses_that_mean_loopback_are_loopback() {
        for address in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert_eq!(Origin::of_tcp(address.parse().unwrap()), Origin::Loopback, "{address}");
        }
        for address in ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "[2001:db8::1]:1"] {
            assert_eq!(Origin::of_tcp(address.parse().unwrap()), Origin::Network, "{address}");
        }
    }
}
