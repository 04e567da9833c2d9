//! The load of a model in the headers of its answers, for load balancers that request it. The
//! format is ORCA, which Envoy reads and Triton's clients request.

use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, Response};
use serde_json::json;
use shadowslice_datapath::pipeline::ModelLoad;

/// The header with the requested format, which is `text` or `json`.
const FORMAT_HEADER: HeaderName = HeaderName::from_static("endpoint-load-metrics-format");

pub(super) const HEADER: &str = "endpoint-load-metrics";

/// Adds the header to an answer, if the client requested it.
pub(super) fn add<B>(answer: &mut Response<B>, load: Option<HeaderValue>) {
    if let Some(load) = load {
        answer.headers_mut().insert(HeaderName::from_static(HEADER), load);
    }
}

/// Returns the value of the header, or `None` if the request names no known format.
pub(super) fn header(request: &HeaderMap, load: impl FnOnce() -> (ModelLoad, usize)) -> Option<HeaderValue> {
    let format = request.get(FORMAT_HEADER)?.as_bytes();
    let is_text = format.eq_ignore_ascii_case(b"text");
    if !is_text && !format.eq_ignore_ascii_case(b"json") {
        return None;
    }
    let (ModelLoad { utilisation, rate, errors }, waiting) = load();
    let report = match is_text {
        true => format!(
            "TEXT application_utilization={utilisation:.4}, rps_fractional={rate:.2}, eps={errors:.2}, named_metrics.waiting={waiting}"
        ),
        false => {
            let report = json!({
                "application_utilization": utilisation, "rps_fractional": rate, "eps": errors,
                "named_metrics": {"waiting": waiting},
            });
            format!("JSON {report}")
        }
    };
    HeaderValue::try_from(report).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_has_the_requested_format() {
        let load = || (ModelLoad { utilisation: 0.5, rate: 120.0, errors: 0.0 }, 3);
        let header_in = |format: Option<&'static str>| {
            let mut request = HeaderMap::new();
            request.extend(format.map(|format| (FORMAT_HEADER, HeaderValue::from_static(format))));
            header(&request, load).map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(header_in(None), None);
        assert_eq!(header_in(Some("protobuf")), None);
        let text =
            "TEXT application_utilization=0.5000, rps_fractional=120.00, eps=0.00, named_metrics.waiting=3";
        assert_eq!(header_in(Some("text")).as_deref(), Some(text));
        let json = header_in(Some("JSON")).unwrap();
        let json: serde_json::Value = serde_json::from_str(json.strip_prefix("JSON ").unwrap()).unwrap();
        assert_eq!((&json["rps_fractional"], &json["named_metrics"]["waiting"]), (&120.0.into(), &3.into()));
    }
}
