//! Writes profiles in YAML.

use shadowslice_shared::profile::{Profile, ProfileSource};

use crate::status::MIB;

/// Writes a profile as YAML. Reading the text returns the same profile except for rounding:
/// execution times to 1 µs, start times to 1 ms, and memory up to the next MiB.
pub(super) fn write(profile: &Profile, comment: &str) -> String {
    let Profile { source, memory, start, bandwidth, shapes, execution } = profile;
    let source = match source {
        ProfileSource::Illustrative => "{kind: illustrative}".to_owned(),
        ProfileSource::Measured { device, driver, date } => {
            format!("{{kind: measured, device: {device:?}, driver: {driver:?}, date: {date:?}}}")
        }
    };
    let [context, weights, activations] =
        [memory.context, memory.weights, memory.activations].map(|bytes| bytes.div_ceil(MIB));
    let [process, load, warm] = [start.process, start.load, start.warm].map(|span| span.as_millis());
    let shapes = match shapes.len() {
        0 => String::new(),
        // The shapes are written as JSON, which is valid YAML.
        _ => format!("shapes: {}\n", serde_json::json!(shapes)),
    };
    let columns: Vec<String> = execution.sms().iter().map(|sms| sms.0.to_string()).collect();
    let mut text: String = comment.lines().map(|line| format!("# {line}\n")).collect();
    text.push_str(&format!(
        "source: {source}
memory: {{context: {context}Mi, weights: {weights}Mi, activations: {activations}Mi}}
start: {{process: {process}ms, load: {load}ms, warm: {warm}ms}}
bandwidth: {bandwidth}
{shapes}execution_ms:
  sms: [{}]
",
        columns.join(", ")
    ));
    for row in execution.rows() {
        let times: Vec<String> = row.ms.iter().map(|ms| format!("{ms:.3}")).collect();
        text.push_str(&format!("  {}: [{}]\n", row.batch, times.join(", ")));
    }
    text
}
