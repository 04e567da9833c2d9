//! The load of a model beside its answers, for load balancers that ask for it (ORCA, as Envoy reads
//! and Triton's clients ask for it).

use std::fmt::Write as _;

use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};
use serde_json::json;
use shadowslice_datapath::pipeline::ModelLoad;

/// `text` or `json`.
const ASKED: HeaderName = HeaderName::from_static("endpoint-load-metrics-format");

pub(crate) const TOLD: &str = "endpoint-load-metrics";

/// `None` if the request does not ask, or for a form that is not known.
pub(crate) fn told(asked: &HeaderMap, load: impl FnOnce() -> (ModelLoad, usize)) -> Option<HeaderValue> {
    let form = asked.get(ASKED)?.as_bytes();
    let text = match () {
        () if form.eq_ignore_ascii_case(b"text") => text(load()),
        () if form.eq_ignore_ascii_case(b"json") => json_text(load()),
        () => return None,
    };
    HeaderValue::try_from(text).ok()
}

fn text((ModelLoad { utilisation, rate, errors }, waiting): (ModelLoad, usize)) -> String {
    let mut text = String::with_capacity(128);
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "TEXT application_utilization={utilisation:.4}, rps_fractional={rate:.2}, eps={errors:.2}, named_metrics.waiting={waiting}"
    );
    text
}

fn json_text((ModelLoad { utilisation, rate, errors }, waiting): (ModelLoad, usize)) -> String {
    let report = json!({
        "application_utilization": utilisation, "rps_fractional": rate, "eps": errors,
        "named_metrics": {"waiting": waiting},
    });
    format!("JSON {report}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_told_in_the_form_that_is_asked_for() {
        let load = || (ModelLoad { utilisation: 0.5, rate: 120.0, errors: 0.0 }, 3);
        let told = |form: Option<&'static str>| {
            let mut asked = HeaderMap::new();
            asked.extend(form.map(|form| (ASKED, HeaderValue::from_static(form))));
            told(&asked, load).map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(told(None), None);
        assert_eq!(told(Some("protobuf")), None);
        let text =
            "TEXT application_utilization=0.5000, rps_fractional=120.00, eps=0.00, named_metrics.waiting=3";
        assert_eq!(told(Some("text")).as_deref(), Some(text));
        let json = told(Some("JSON")).unwrap();
        let json: serde_json::Value = serde_json::from_str(json.strip_prefix("JSON ").unwrap()).unwrap();
        assert_eq!((&json["rps_fractional"], &json["named_metrics"]["waiting"]), (&120.0.into(), &3.into()));
    }
}
