//! Profiles as files.

use std::fmt::Write;
use std::time::Duration;

use shadowslice_shared::profile::{Profile, Source};

const MIB: u64 = 1 << 20;

/// The file of a profile, which reads as the same profile except for rounding: times to a µs,
/// memory up to a MiB.
pub(super) fn write(profile: &Profile, comment: &str) -> String {
    let mut text = String::new();
    for line in comment.lines() {
        push(&mut text, format_args!("# {line}"));
    }
    match &profile.source {
        Source::Illustrative => push(&mut text, format_args!("source: {{kind: illustrative}}")),
        Source::Measured { device, driver, date } => push(
            &mut text,
            format_args!(
                "source: {{kind: measured, device: {device:?}, driver: {driver:?}, date: {date:?}}}"
            ),
        ),
    }
    let mib = |bytes: u64| bytes.div_ceil(MIB);
    let memory = &profile.memory;
    push(
        &mut text,
        format_args!(
            "memory: {{context: {}Mi, weights: {}Mi, activations: {}Mi}}",
            mib(memory.context),
            mib(memory.weights),
            mib(memory.activations)
        ),
    );
    let ms = |span: Duration| span.as_millis();
    let start = &profile.start;
    push(
        &mut text,
        format_args!(
            "start: {{process: {}ms, load: {}ms, warm: {}ms}}",
            ms(start.process),
            ms(start.load),
            ms(start.warm)
        ),
    );
    push(&mut text, format_args!("bandwidth: {}", profile.bandwidth));
    push(&mut text, format_args!("execution_ms:"));
    let columns: Vec<String> = profile.execution.sms().iter().map(|sms| sms.0.to_string()).collect();
    push(&mut text, format_args!("  sms: [{}]", columns.join(", ")));
    for row in profile.execution.rows() {
        let times: Vec<String> = row.ms.iter().map(|ms| format!("{ms:.3}")).collect();
        push(&mut text, format_args!("  {}: [{}]", row.batch, times.join(", ")));
    }
    text
}

fn push(text: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    writeln!(text, "{line}").ok();
}
