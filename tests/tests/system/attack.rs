//! Faults of workers in each role and phase, under load. `make attack` prints the results as a
//! table.

use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::load::{ArrivalPattern, LoadPlan, LoadTally};
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::{ModelStatusJson, WorkerStatusJson};

use crate::fixtures::{EMULATED, assert_nothing_lost, echo, planned_load, profile};

/// The signals that cause the faults. SIGTERM makes a worker exit without a crash.
const FAULTS: [Signal; 4] = [Signal::SIGKILL, Signal::SIGSTOP, Signal::SIGSEGV, Signal::SIGTERM];

/// The event that puts a worker into its role and phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trigger {
    Start,
    /// The death of the worker that serves.
    Death,
    Resize,
}

/// The role and phase of the faulty worker, the event that precedes the fault, and a flag that is
/// true if the model has a standby.
const CELLS: [(&str, &str, Trigger, bool); 8] = [
    ("incumbent", "serving", Trigger::Start, false),
    ("incumbent", "serving", Trigger::Start, true),
    ("incumbent", "warming", Trigger::Death, false),
    ("shadow", "warming", Trigger::Resize, false),
    ("incumbent", "serving", Trigger::Resize, false),
    ("parked", "standing", Trigger::Resize, false),
    ("standby", "warming", Trigger::Start, true),
    ("standby", "standing", Trigger::Start, true),
];

/// The maximum latency of a request, in ms. A hanging start times out after 3 s, and the recovery
/// may take another 2 s.
const BACK_WITHIN: f64 = 5000.0;

async fn server(standby: bool) -> Result<ServerUnderTest, HarnessError> {
    let standby = if standby { "always" } else { "off" };
    let more = format!(
        "profile: profile.yaml, share: {{initial: 50%}}, queue: {{on_late: serve}}, standby: {standby}"
    );
    let timeouts = "timeouts: {spawn: 3s, warm: 3s, dwell: 2s, stop: 500ms}\n";
    let home = Home::with_config(&format!("{EMULATED}{timeouts}models:\n  - {}\n", echo("echo", &more)))?;
    home.write("profile.yaml", profile(5.0).replace("load: 50ms", "load: 200ms"))?;
    ServerUnderTest::start_ready(home).await
}

fn find<'m>(model: &'m ModelStatusJson, role: &str, phase: &str) -> Option<&'m WorkerStatusJson> {
    model.workers.iter().find(|worker| worker.role == role && worker.more["phase"] == phase)
}

/// Causes the fault once a worker has this role and phase. Returns false if there was no such
/// worker.
async fn strike(
    server: &ServerUnderTest,
    (role, phase, way, _): (&str, &str, Trigger, bool),
    fault: Signal,
) -> Result<bool, HarnessError> {
    let serving = |model: &ModelStatusJson| find(model, "incumbent", "serving").map(|worker| worker.pid);
    let first = server.wait_status("echo", "a worker", |model| serving(model).is_some()).await?;
    let first = serving(&first).unwrap_or_default();
    if way == Trigger::Death {
        ProcessHandle::of(first).map(|process| process.signal(Signal::SIGKILL));
    }
    let there = |model: &ModelStatusJson| {
        let other =
            |worker: &WorkerStatusJson| way == Trigger::Start || role == "parked" || worker.pid != first;
        find(model, role, phase).is_some_and(other)
    };
    let hit = async {
        let model = server.wait_status("echo", "the role and the phase", there).await?;
        let worker = find(&model, role, phase).and_then(|worker| ProcessHandle::of(worker.pid));
        Ok::<_, HarnessError>(worker.is_some_and(|worker| worker.signal(fault).is_ok()))
    };
    if way != Trigger::Resize {
        return hit.await;
    }
    // The result of the resize depends on the fault, so it is ignored.
    let (_, hit) = tokio::join!(server.resize("echo", 20), hit);
    hit
}

async fn cell(cell: (&str, &str, Trigger, bool), fault: Signal) -> Result<(bool, LoadTally), HarnessError> {
    let server = server(cell.3).await?;
    let plan =
        LoadPlan { rate: 100.0, span: Duration::from_secs(5), arrivals: ArrivalPattern::Poisson, seed: 3 };
    let loading = planned_load(&server, "echo", plan);
    let hit = strike(&server, cell, fault).await?;
    let tally = loading.await.expect("the load does not panic");
    server.wait_status("echo", "a worker that serves", |model| model.state == "ready").await?;
    server.stop().await?;
    Ok((hit, tally))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; `make attack` runs it"]
async fn no_fault_of_a_worker_costs_a_request() {
    println!("the longest request in ms, by the worker's role and phase and its fault:");
    for each in CELLS {
        let (role, phase, way, standby) = each;
        let mut row = format!("{role:>10} {phase:<9} {way:<8?} standby {standby:<5}", way = way);
        for fault in FAULTS {
            let (hit, tally) = cell(each, fault).await.unwrap();
            assert!(hit, "{each:?}: no worker was hit by {fault}");
            assert_nothing_lost(&tally);
            let longest = tally.latency_ms(1.0);
            row += &format!("  {fault} {longest:>5.0}");
            assert!(longest <= BACK_WITHIN, "{row}");
        }
        println!("{row}");
    }
}
