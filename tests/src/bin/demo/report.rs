//! The text output of the demo.

use std::sync::atomic::Ordering;
use std::time::Duration;

use shadowslice_tests::home::HarnessError;
use shadowslice_tests::load::LoadTally;
use shadowslice_tests::status::{HandoverJson, StatusJson};

use crate::resizes::Resizes;
use crate::workload::Workload;

/// The delay, in ms, up to which the demo ignores that a client sent a request late.
const LATE_MS: f64 = 10.0;

/// Prints a line of progress.
pub(crate) fn progress(at: Duration, workloads: &[Workload]) {
    let so_far = workloads.iter().map(|workload| {
        let tally = workload.tally.lock();
        let (answered, p99) = (tally.answered(), tally.latency_ms(0.99));
        let trouble = tally.wrong + tally.failures();
        let trouble = if trouble == 0 { String::new() } else { format!(", {trouble} WRONG OR FAILED") };
        format!("{} {answered} answers, p99 {p99:.0} ms{trouble}", workload.name)
    });
    println!("{} {}", clock(at), so_far.collect::<Vec<_>>().join(" | "));
}

/// Prints a line about a resize.
pub(crate) fn resized(at: Duration, model: &str, handover: &HandoverJson) {
    let HandoverJson { from_sms, to_sms, mechanism, .. } = handover;
    println!(
        "{}   resized {model} from {from_sms} to {to_sms} SMs ({mechanism}), in effect after {} ms, stall {} us",
        clock(at),
        number(handover.effect_ms, 0),
        number(handover.stall_us, 0),
    );
}

/// Prints a line about a failed resize.
pub(crate) fn not_resized(at: Duration, model: &str, error: &HarnessError) {
    println!("{}   FAILED to resize {model}: {error}", clock(at));
}

fn clock(at: Duration) -> String {
    format!("{:5.1} s", at.as_secs_f64())
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "?".into(), |value| format!("{value:.digits$}"))
}

/// The results of the demo.
pub(crate) struct DemoReport<'a> {
    /// The models, with the results of their requests.
    pub(crate) workloads: &'a [Workload],
    /// The resizes of each model, in the order of the models.
    pub(crate) resizes: &'a [Resizes],
}

impl DemoReport<'_> {
    /// Prints the final table, with figures from the supervisor's `status`.
    pub(crate) fn table(&self, status: &StatusJson) {
        println!(
            "\n{:<9}{:>9}{:>9}{:>7}{:>8}{:>9}{:>9}{:>9}{:>8}{:>12}{:>9}{:>12}{:>13}",
            "model",
            "requests",
            "checked",
            "wrong",
            "failed",
            "p50",
            "p99",
            "SLO",
            "in SLO",
            "mechanism",
            "resizes",
            "worst stall",
            "worst effect",
        );
        for (workload, resizes) in self.workloads.iter().zip(self.resizes) {
            let model = status.model(workload.name);
            let slo = model.map_or(f64::NAN, |model| model.slo.latency_ms);
            row(workload.name, &workload.tally.lock(), slo, resizes);
        }
        println!();
        self.remarks();
    }

    /// Prints the verdict, and returns true if the demo passed. It passes if no request was lost or
    /// answered wrongly, every resize succeeded, and no resize was rolled back.
    pub(crate) fn verdict(&self, status: &StatusJson) -> bool {
        let lost: u64 = self.workloads.iter().map(|workload| workload.tally.lock().failures()).sum();
        let wrong: u64 = self.workloads.iter().map(|workload| workload.tally.lock().wrong).sum();
        let answered = self.workloads.iter().all(|workload| workload.tally.lock().right > 0);
        let failed: u64 = self.resizes.iter().map(|resizes| resizes.failed).sum();
        let undone = failed + status.models.iter().map(|model| model.handovers.rolled_back).sum::<u64>();
        let passed = lost == 0 && wrong == 0 && undone == 0 && answered;
        println!(
            "{}: {lost} requests lost, {wrong} answered wrongly, {undone} resizes failed",
            if passed { "PASSED" } else { "FAILED" }
        );
        passed
    }

    fn remarks(&self) {
        for workload in self.workloads {
            let tally = workload.tally.lock();
            if let Some(truths) = &workload.truths {
                let accuracy = 100.0 * truths.load(Ordering::Relaxed) as f64 / tally.answered().max(1) as f64;
                println!("{}: {accuracy:.1} % of the predicted labels are correct", workload.name);
            }
            let late = tally.sent_late_ms(1.0);
            if late > LATE_MS {
                println!(
                    "{}: the machine was busy: a request was sent up to {late:.0} ms late, which its latency includes",
                    workload.name
                );
            }
            for (why, count) in &tally.failed {
                println!("{}: {count} requests failed: {why}", workload.name);
            }
            for how in &tally.examples {
                println!("{}: wrong answer: {how}", workload.name);
            }
        }
    }
}

fn row(model: &str, tally: &LoadTally, slo: f64, resizes: &Resizes) {
    let worst =
        |value: fn(&HandoverJson) -> Option<f64>| resizes.completed.iter().filter_map(value).reduce(f64::max);
    let by = resizes.completed.last().map_or("?", |handover| handover.mechanism.as_str());
    let kept = 100.0 * tally.attainment(Duration::from_secs_f64(slo.max(0.0) / 1e3));
    println!(
        "{model:<9}{:>9}{:>9}{:>7}{:>8}{:>6.1} ms{:>6.1} ms{slo:>6.0} ms{kept:>6.1} %{by:>12}{:>9}{:>9} us{:>10} ms",
        tally.offered,
        tally.answered(),
        tally.wrong,
        tally.failures(),
        tally.latency_ms(0.5),
        tally.latency_ms(0.99),
        resizes.completed.len(),
        number(worst(|handover| handover.stall_us), 0),
        number(worst(|handover| handover.effect_ms), 0),
    );
}
