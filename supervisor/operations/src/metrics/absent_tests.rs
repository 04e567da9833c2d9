use super::tests::{NOTHING, model};
use super::*;

#[test]
fn a_certificate_has_its_file_and_its_end() {
    let certificate =
        Certificate { file: "/etc/tls \"x\".pem".to_owned(), kind: "client_ca", expires: 4_102_444_800 };
    let own = SupervisorMetrics { certificates: vec![certificate], ..NOTHING };
    let text = render(&[], None, None, &[], &own);
    let line = "shadowslice_certificate_expiry_timestamp_seconds{file=\"/etc/tls \\\"x\\\".pem\",kind=\"client_ca\"} 4102444800";
    assert!(text.lines().any(|lines_of| lines_of == line), "{text}");
}

#[test]
fn waiting_workers_are_counted_by_the_awaited_resource() {
    let lines_of = |waits| {
        let model = ModelMetrics { waits, ..model("m") };
        let text = render(&[model], None, None, &[], &NOTHING);
        let lines = text.lines().filter(|line| line.starts_with("shadowslice_workers_waiting"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let labels = "shadowslice_workers_waiting{model=\"m\",gpu=\"1\",reason=";
    assert_eq!(lines_of(Vec::new()), Vec::<String>::new());
    assert_eq!(lines_of(vec![WaitReason::Mps]), [format!("{labels}\"mps\"}} 1")]);
    assert_eq!(lines_of(vec![WaitReason::Memory, WaitReason::Memory]), [format!("{labels}\"memory\"}} 2")]);
}
