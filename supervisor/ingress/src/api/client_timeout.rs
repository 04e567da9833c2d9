//! The timeouts that clients and proxies give in the headers of a request. They begin when the request
//! arrives, as the parameter `timeout` does.

use std::time::Duration;

use hyper::HeaderMap;
use shadowslice_datapath::pipeline::RequestFailure;

use crate::admission::{Clipped, invalid};

/// The name of the header with a client's timeout, in milliseconds.
const REQUEST_TIMEOUT: &str = "x-request-timeout-ms";

/// The name of the header with the rest of a request's timeout, in milliseconds. Envoy sets it.
const ENVOY_TIMEOUT: &str = "x-envoy-expected-rq-timeout-ms";

/// The name of the header with the timeout of a gRPC call.
const GRPC_TIMEOUT: &str = "grpc-timeout";

/// The maximum number of digits of a timeout, as in gRPC. In milliseconds, this is more than a day.
const MAX_DIGITS: usize = 8;

/// Returns the shortest timeout in the headers. The value 0 means no timeout, except in gRPC, where the
/// deadline has then passed.
///
/// # Errors
///
/// Returns an error if a timeout is malformed.
pub(super) fn client_timeout(headers: &HeaderMap) -> Result<Option<Duration>, RequestFailure> {
    let mut shortest = None;
    let readers: [(&str, ReadTimeout); 3] =
        [(GRPC_TIMEOUT, grpc), (REQUEST_TIMEOUT, milliseconds), (ENVOY_TIMEOUT, milliseconds)];
    for (name, read) in readers {
        for value in headers.get_all(name) {
            let given = value.to_str().ok().and_then(read);
            let Some(timeout) = given else { return malformed(name, value.as_bytes()) };
            shortest = [shortest, timeout.0].into_iter().flatten().min();
        }
    }
    Ok(shortest)
}

/// A well-formed timeout, or `None` if the client wants none.
struct GivenTimeout(Option<Duration>);

type ReadTimeout = fn(&str) -> Option<GivenTimeout>;

fn milliseconds(text: &str) -> Option<GivenTimeout> {
    let timeout = Duration::from_millis(number(text)?);
    Some(GivenTimeout((!timeout.is_zero()).then_some(timeout)))
}

/// Reads a number with a unit, such as `100m` for 100 ms.
fn grpc(text: &str) -> Option<GivenTimeout> {
    let unit = text.chars().next_back()?;
    let number = number(text.strip_suffix(unit)?)?;
    let timeout = match unit {
        'H' => Duration::from_secs(number * 3_600),
        'M' => Duration::from_secs(number * 60),
        'S' => Duration::from_secs(number),
        'm' => Duration::from_millis(number),
        'u' => Duration::from_micros(number),
        'n' => Duration::from_nanos(number),
        _ => return None,
    };
    Some(GivenTimeout(Some(timeout)))
}

fn number(digits: &str) -> Option<u64> {
    let is_number = digits.len() <= MAX_DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| is_number)
}

fn malformed<T>(name: &str, value: &[u8]) -> Result<T, RequestFailure> {
    let form = if name == GRPC_TIMEOUT { " and a unit (H, M, S, m, u or n)" } else { ", in milliseconds" };
    let got = String::from_utf8_lossy(value);
    invalid(format!("{name} must have up to {MAX_DIGITS} digits{form}, got '{}'", Clipped(&got)))
}

#[cfg(test)]
mod tests {
    use hyper::header::{HeaderName, HeaderValue};

    use super::*;

    fn of(headers: &[(&'static str, &'static str)]) -> Result<Option<Duration>, String> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        client_timeout(&map).map_err(|why| why.to_string())
    }

    #[test]
    fn the_shortest_of_all_timeouts_counts() {
        let ms = |ms| Ok(Some(Duration::from_millis(ms)));
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(of(&[(REQUEST_TIMEOUT, "250")]), ms(250));
        assert_eq!(of(&[(ENVOY_TIMEOUT, "40"), (REQUEST_TIMEOUT, "250")]), ms(40));
        assert_eq!(of(&[(GRPC_TIMEOUT, "1S"), (ENVOY_TIMEOUT, "2000"), (ENVOY_TIMEOUT, "1500")]), ms(1_000));
        assert_eq!(of(&[(ENVOY_TIMEOUT, "0"), (REQUEST_TIMEOUT, "0")]), Ok(None));
        assert_eq!(of(&[(GRPC_TIMEOUT, "0n"), (REQUEST_TIMEOUT, "5")]), ms(0));
    }

    #[test]
    fn grpc_timeouts_have_units_and_the_largest_one_does_not_overflow() {
        for (text, seconds) in [("2H", 7_200.0), ("3M", 180.0), ("4S", 4.0), ("5m", 5e-3), ("6u", 6e-6)] {
            assert_eq!(of(&[(GRPC_TIMEOUT, text)]).unwrap().unwrap().as_secs_f64(), seconds, "{text}");
        }
        assert_eq!(of(&[(GRPC_TIMEOUT, "7n")]), Ok(Some(Duration::from_nanos(7))));
        let longest = of(&[(GRPC_TIMEOUT, "99999999H")]).unwrap().unwrap();
        assert_eq!(longest, Duration::from_secs(99_999_999 * 3_600));
    }

    #[test]
    fn malformed_timeouts_are_refused() {
        for text in ["", "5", "m", "-5m", "+5m", "5.5m", "5 m", "5x", "123456789m", "5ms"] {
            let why = of(&[(GRPC_TIMEOUT, text)]).unwrap_err();
            assert!(why.contains("grpc-timeout must have up to 8 digits and a unit"), "{text}: {why}");
        }
        for text in ["", "x", "-1", "1.5", "100000000", "5m", "0x10"] {
            let why = of(&[(REQUEST_TIMEOUT, text)]).unwrap_err();
            assert!(why.contains("x-request-timeout-ms") && why.contains("milliseconds"), "{text}: {why}");
        }
    }
}
