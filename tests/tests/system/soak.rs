//! Long runs for `make soak`. Two runs compare the latencies during hand-overs with those of a twin
//! run without hand-overs: one under an open-loop load, and one with saturated models. Two further
//! runs kill a hundred workers each, one run without a standby and one with a standby.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use parking_lot::Mutex;
use shadowslice_tests::home::HarnessError;
use shadowslice_tests::load::{self, ArrivalPattern, LoadPlan, LoadTally};
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::random::SplitMix64;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::{HandoverJson, ModelStatusJson};

use crate::fixtures::{ask, assert_nothing_lost, echo_case, one_echo, one_echo_under, planned_load};

/// The number of hand-overs in the long run.
const HANDOVERS: usize = 1000;

/// The number of hand-overs under closed-loop load.
const CLOSED_LOOP_HANDOVERS: usize = 100;

/// The number of workers that the long run kills.
const KILLS: usize = 100;

/// The execution time of a batch in ms, which is the same for all shares in these tests.
const BATCH_MS: f64 = 20.0;

/// A closed-loop load that saturates the model.
struct ClosedLoop {
    clients: usize,
    /// The execution time in the profile of batches with up to 16 rows, in ms.
    up_to_16_rows_ms: f64,
    /// The execution time of the batches that these clients fill, in ms. Batches of 32 rows take
    /// twice as long as batches of 16 rows.
    batch_ms: f64,
}

const CLOSED_LOOPS: [ClosedLoop; 3] = [
    ClosedLoop { clients: 8, up_to_16_rows_ms: BATCH_MS, batch_ms: BATCH_MS },
    ClosedLoop { clients: 64, up_to_16_rows_ms: 5.0, batch_ms: 10.0 },
    ClosedLoop { clients: 64, up_to_16_rows_ms: 0.5, batch_ms: 1.0 },
];

/// The shares in rotation. Each share returns only after two other shares. Otherwise its worker
/// would still be parked, and no shadow would start.
const SHARES: [u32; 3] = [80, 70, 60];

/// The keys of the model. No request is refused as late, and all shares are large enough not to
/// slow batches down. Only hand-overs can therefore cause differences.
const MODEL: &str = "share: {initial: 60%}, queue: {on_late: serve}";
const WITH_STANDBY: &str = "share: {initial: 60%}, queue: {on_late: serve}, standby: always";

/// Returns the n-th part of a load, which may have any number of parts.
fn part(n: u64) -> LoadPlan {
    LoadPlan { rate: 60.0, span: Duration::from_secs(10), arrivals: ArrivalPattern::Poisson, seed: n }
}

/// Runs an open-loop load on a server until `work` ends. Returns the tally of the load, the number
/// of its parts, and the result of `work`.
async fn loaded_while<T>(server: &ServerUnderTest, work: impl Future<Output = T>) -> (LoadTally, u64, T) {
    let mut tally = LoadTally::default();
    let mut parts = 0;
    let mut done = None;
    tokio::pin!(work);
    while done.is_none() {
        parts += 1;
        let mut loading = planned_load(server, "echo", part(parts));
        let loaded = loop {
            tokio::select! {
                value = &mut work, if done.is_none() => done = Some(value),
                loaded = &mut loading => break loaded,
            }
        };
        tally.add(&loaded.expect("the load does not panic"));
    }
    (tally, parts, done.expect("the loop ends with a value"))
}

async fn hand_over(server: &ServerUnderTest, count: usize) -> Result<Vec<HandoverJson>, HarnessError> {
    let mut handovers = Vec::with_capacity(count);
    for n in 0..count {
        handovers.push(server.resize_by_socket("echo", SHARES[n % SHARES.len()]).await?);
    }
    Ok(handovers)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; `make soak` runs it"]
async fn a_thousand_handovers_lose_nothing_and_cost_at_most_a_batch() {
    let server = one_echo(BATCH_MS, MODEL).await.unwrap();
    let (tally, parts, handovers) = loaded_while(&server, hand_over(&server, HANDOVERS)).await;
    let handovers = handovers.unwrap();
    server.stop().await.unwrap();

    let server = one_echo(BATCH_MS, MODEL).await.unwrap();
    let mut twin = LoadTally::default();
    for n in 1..=parts {
        twin.add(&planned_load(&server, "echo", part(n)).await.unwrap());
    }
    server.stop().await.unwrap();

    report(&handovers, &tally, &twin);
    assert_nothing_lost(&tally);
    assert_nothing_lost(&twin);
    assert!(
        tally.latency_ms(0.999) <= twin.latency_ms(0.999) + BATCH_MS,
        "p99.9 is more than one batch higher"
    );
}

/// Runs a closed-loop load until `work` ends. Returns the tally of the load and the result of `work`.
async fn closed_loop_while<T>(
    server: &ServerUnderTest,
    clients: usize,
    work: impl Future<Output = T>,
) -> (LoadTally, T) {
    let (client, tally) = (server.client(), Arc::<Mutex<LoadTally>>::default());
    let request = move |n: usize| {
        let client = client.clone();
        async move { ask(client, "echo", &echo_case(u16::try_from(n % 60_000).unwrap_or(0)), 0.0).await }
    };
    let done = load::run_closed(clients, &tally, request, work).await;
    let tally = tally.lock();
    (tally.clone(), done)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; `make soak` runs it"]
async fn handovers_of_saturated_models_cost_at_most_a_batch() {
    for ClosedLoop { clients, up_to_16_rows_ms, batch_ms } in CLOSED_LOOPS {
        let server = one_echo(up_to_16_rows_ms, MODEL).await.unwrap();
        let began = Instant::now();
        let (tally, handovers) =
            closed_loop_while(&server, clients, hand_over(&server, CLOSED_LOOP_HANDOVERS)).await;
        let (handovers, took) = (handovers.unwrap(), began.elapsed());
        server.stop().await.unwrap();

        let server = one_echo(up_to_16_rows_ms, MODEL).await.unwrap();
        let (twin, ()) = closed_loop_while(&server, clients, tokio::time::sleep(took)).await;
        server.stop().await.unwrap();

        println!("{clients} closed-loop clients, batches of {batch_ms} ms:");
        report(&handovers, &tally, &twin);
        assert_nothing_lost(&tally);
        assert_nothing_lost(&twin);
        assert!(
            tally.latency_ms(0.999) <= twin.latency_ms(0.999) + batch_ms,
            "p99.9 is more than one batch higher"
        );
    }
}

#[expect(clippy::print_stdout, reason = "the run prints a table for its user")]
fn report(handovers: &[HandoverJson], tally: &LoadTally, twin: &LoadTally) {
    let stalls = handovers.iter().filter_map(|handover| handover.stall_us);
    let stalled = stalls.clone().filter(|stall| *stall > 0.0).count();
    println!(
        "{} hand-overs, {stalled} with a stall, longest {} us",
        handovers.len(),
        stalls.fold(0.0, f64::max)
    );
    for (what, tally) in [("disturbed", tally), ("twin run", twin)] {
        let ms = |quantile| tally.latency_ms(quantile);
        println!(
            "{what}: {} requests, {} correct; ms: p50 {:.1}, p99 {:.1}, p99.9 {:.1}, longest {:.1}",
            tally.offered,
            tally.right,
            ms(0.5),
            ms(0.99),
            ms(0.999),
            ms(1.0)
        );
    }
}

/// Kills the serving worker repeatedly. Before each kill, another worker must serve and a standby
/// must be ready.
async fn kill_the_serving_worker(server: &ServerUnderTest, count: usize) -> Result<(), HarnessError> {
    let mut killed = 0;
    for _ in 0..count {
        let phase = |model: &ModelStatusJson, phase: &str| {
            let found = model.workers.iter().find(|worker| worker.more["phase"] == phase);
            found.map(|worker| worker.pid)
        };
        let recovered = |model: &ModelStatusJson| {
            phase(model, "standing").is_some() && phase(model, "serving").is_some_and(|pid| pid != killed)
        };
        let model = server.wait_status("echo", "another serving worker and a standby", recovered).await?;
        killed = phase(&model, "serving").unwrap_or_default();
        let dead = ProcessHandle::of(killed).is_some_and(|process| process.signal(Signal::SIGKILL).is_ok());
        assert!(dead, "no worker serves: {model:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; `make soak` runs it"]
async fn a_killed_worker_with_a_standby_costs_at_most_a_batch_and_20_ms() {
    serving_workers_are_killed("static").await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; `make soak` runs it"]
async fn a_killed_worker_while_a_policy_acts_costs_at_most_a_batch_and_20_ms() {
    serving_workers_are_killed("adaptive").await;
}

#[expect(clippy::unwrap_used, clippy::print_stdout, reason = "the body of two tests")]
async fn serving_workers_are_killed(policy: &str) {
    const BATCH_MS: f64 = 5.0;
    let server = one_echo_under(policy, BATCH_MS, WITH_STANDBY).await.unwrap();
    let began = Instant::now();
    let (tally, killed) = closed_loop_while(&server, 8, kill_the_serving_worker(&server, KILLS)).await;
    killed.unwrap();
    let took = began.elapsed();
    let (twin, ()) = closed_loop_while(&server, 8, tokio::time::sleep(took)).await;
    server.stop().await.unwrap();
    println!("{KILLS} kills of the serving worker, under the policy {policy}:");
    report(&[], &tally, &twin);
    assert_nothing_lost(&tally);
    assert!(
        tally.latency_ms(1.0) <= twin.latency_ms(0.999) + BATCH_MS + 20.0,
        "the effect of a kill is longer"
    );
}

/// Kills workers of all roles at random times while shares change.
async fn kill_at_random(server: &ServerUnderTest, count: usize) -> Result<usize, HarnessError> {
    let mut random = SplitMix64::new(11);
    let mut killed = 0;
    while killed < count {
        // Resizes and kills happen at the same time in this test, so a resize may be refused or
        // aborted.
        let resizing = server.resize("echo", SHARES[killed % SHARES.len()]);
        let killing = async {
            tokio::time::sleep(Duration::from_secs_f64(random.fraction() * 0.4)).await;
            let workers = server.model("echo").await?.workers;
            let chosen = workers.get((random.fraction() * workers.len() as f64) as usize);
            let process = chosen.and_then(|worker| ProcessHandle::of(worker.pid));
            Ok::<_, HarnessError>(process.is_some_and(|process| process.signal(Signal::SIGKILL).is_ok()))
        };
        let (_, hit) = tokio::join!(resizing, killing);
        killed += usize::from(hit?);
        // Consecutive deaths without an answer make a model unready, so the test waits for answers.
        let answered = server.model("echo").await?.requests.succeeded;
        server.wait_status("echo", "answers", |model| model.requests.succeeded > answered + 2).await?;
    }
    Ok(killed)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; `make soak` runs it"]
async fn clients_see_none_of_a_hundred_kills() {
    a_hundred_kills(MODEL).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; `make soak` runs it"]
async fn clients_see_none_of_a_hundred_kills_with_a_standby() {
    a_hundred_kills(WITH_STANDBY).await;
}

#[expect(clippy::unwrap_used, clippy::print_stdout, reason = "the body of two tests")]
async fn a_hundred_kills(model: &str) {
    let server = one_echo(BATCH_MS, model).await.unwrap();
    let (tally, _, killed) = loaded_while(&server, kill_at_random(&server, KILLS)).await;
    let retried = server.model("echo").await.unwrap().requests.retried;
    println!(
        "{model}: {} kills, {} requests, {} correct, {retried} retried, longest {:.0} ms",
        killed.unwrap(),
        tally.offered,
        tally.right,
        tally.latency_ms(1.0)
    );
    assert_nothing_lost(&tally);
    server.stop().await.unwrap();
}
