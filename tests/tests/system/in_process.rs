//! Tests of shares that change inside the worker.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;

use crate::fixtures::{EMULATED, assert_nothing_lost, echo, load, one_echo, profile};

/// Parses a list of groups, for example `0-4,7`.
fn groups(text: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        from.parse::<u32>().unwrap_or(0)..=to.parse().unwrap_or(0)
    };
    text.split(',').flat_map(range).collect()
}

async fn two_models(first: &str, second: &str) -> Result<ServerUnderTest, HarnessError> {
    let models = [("one", first), ("two", second)].map(|(name, more)| {
        format!("  - {}\n", echo(name, &format!("profile: profile.yaml, handover: auto, {more}")))
    });
    let home = Home::with_config(&format!("{EMULATED}models:\n{}", models.concat()))?;
    home.write("profile.yaml", profile(2.0))?;
    ServerUnderTest::start_ready(home).await
}

#[tokio::test]
async fn a_share_changes_in_the_same_process_and_batches_take_the_time_of_the_profile() {
    // A batch takes 10 ms on 66 SMs, so it takes 82 ms on the 8 SMs of a share of 10 %.
    let server =
        one_echo(10.0, "handover: auto, share: {initial: 100%}, queue: {on_late: serve}").await.unwrap();
    let before = server.model("echo").await.unwrap();
    assert_eq!(
        (before.mechanism.as_str(), before.groups.as_deref(), before.sms),
        ("in-process", Some("all"), 132)
    );
    let loading = load(&server, "echo", 10.0, Duration::from_secs(3));
    let handover = server.resize("echo", 10).await.unwrap();
    assert_eq!((handover.from_sms, handover.to_sms), (132, 8));
    assert_eq!(handover.mechanism, "in-process");
    let narrow = server
        .wait_status("echo", "batches on 8 SMs", |model| {
            model.more["latency_ms"]["p99"].as_f64() > Some(82.0)
        })
        .await
        .unwrap();
    assert_eq!((narrow.sms, narrow.workers.len(), narrow.workers[0].pid), (8, 1, before.workers[0].pid));
    assert_nothing_lost(&loading.await.unwrap());
    let last = server.model("echo").await.unwrap().handovers.last.unwrap();
    assert!(last.effect_ms.is_some_and(|ms| (82.0..500.0).contains(&ms)), "{last:?}");
    assert_eq!(last.stall_us, Some(0.0));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn ten_thousand_changes_under_load_lose_nothing_and_stall_no_request() {
    let server = one_echo(2.0, "handover: auto, share: {initial: 50%}").await.unwrap();
    let pid = server.model("echo").await.unwrap().workers[0].pid;
    let some_load = || load(&server, "echo", 300.0, Duration::from_secs(10));
    let (mut loading, mut longest) = (some_load(), 0.0_f64);
    for done in 0..10_000_u32 {
        if loading.is_finished() {
            assert_nothing_lost(&std::mem::replace(&mut loading, some_load()).await.unwrap());
        }
        let share = [30, 75, 100, 45, 60][done as usize % 5];
        let handover = server.resize_by_socket("echo", share).await.unwrap();
        longest = longest.max(handover.stall_us.unwrap());
    }
    let model = server.model("echo").await.unwrap();
    assert_eq!((model.handovers.completed, model.handovers.aborted), (10_000, 0));
    assert_eq!((model.workers.len(), model.workers[0].pid), (1, pid));
    assert_eq!(longest, 0.0, "a stall");
    assert_nothing_lost(&loading.await.unwrap());
    server.stop().await.unwrap();
}

#[tokio::test]
async fn shares_that_fit_get_separate_groups_and_others_overlap() {
    let server = two_models("share: {initial: 50%}", "share: {initial: 40%}").await.unwrap();
    let of = async |name: &str| groups(&server.model(name).await.unwrap().groups.unwrap());
    let shared = async || {
        let (one, two) = (of("one").await, of("two").await);
        one.iter().filter(|group| two.contains(group)).count()
    };
    assert_eq!((of("one").await.len(), of("two").await.len(), shared().await), (8, 6, 0));
    server.resize("one", 60).await.unwrap();
    assert_eq!((of("one").await.len(), of("two").await.len(), shared().await), (9, 6, 0));
    // The models have 12 and 6 of the 17 groups, so they share one group.
    server.resize("one", 75).await.unwrap();
    assert_eq!((of("one").await.len(), of("two").await.len(), shared().await), (12, 6, 1));
    server.stop().await.unwrap();
}

/// Returns the execution time in ms of a batch with one row, as the emulated device reports it.
async fn executes(server: &ServerUnderTest, model: &str) -> f64 {
    let model = server.model(model).await;
    model.ok().and_then(|model| model.more["execution_ms"]["1"].as_f64()).unwrap_or(f64::NAN)
}

#[tokio::test]
async fn a_neighbour_on_other_groups_costs_little_and_on_the_same_half() {
    let more = "share: {initial: 50%}, batch: {max: 1}, queue: {on_late: serve}, slo: 10s";
    let server = two_models(more, more).await.unwrap();
    // A batch takes 10 ms on all SMs, and proportionally longer on fewer. On a busy host, a worker
    // may wait for a CPU between two batches. Batches must be long compared with that wait.
    server.home().write("profile.yaml", profile(10.0).replace("[66]", "[132]")).unwrap();
    server.home().run(&["reload"]).await.unwrap();
    // The neighbour gets more requests per second than it can answer, for longer than the other
    // load lasts.
    let side_by_side = async |neighbour_per_s| {
        let busy = load(&server, "two", neighbour_per_s, Duration::from_secs(4));
        assert_nothing_lost(&load(&server, "one", 10.0, Duration::from_secs(2)).await.unwrap());
        assert_nothing_lost(&busy.await.unwrap());
    };
    side_by_side(30.0).await;
    let apart = executes(&server, "one").await;
    // The emulated models share caches and memory bandwidth. A batch therefore takes 10 % longer
    // while the neighbour executes.
    // The half with the last group has only 60 SMs.
    let sms = server.model("one").await.unwrap().sms;
    let alone = 10.0 * 132.0 / f64::from(sms);
    assert!(
        (alone - 0.1..1.1 * alone + 0.1).contains(&apart),
        "{apart} ms on {sms} SMs beside a neighbour on the others"
    );
    for model in ["one", "two"] {
        server.resize(model, 100).await.unwrap();
    }
    side_by_side(120.0).await;
    let together = executes(&server, "one").await;
    assert!(together > 12.5, "{together} ms beside a neighbour on the same SMs");
    server.stop().await.unwrap();
}

/// Returns the percentage of 132 SMs that corresponds to a number of groups of 8 SMs.
fn share(groups: u32) -> u32 {
    (groups * 800).div_ceil(132)
}

/// Checks a model whose neighbours grow towards it from both sides, by one group at a time. The
/// model thus gets dozens of partitions, which are more than its worker keeps ready. The model's
/// own share only grows, by one group at a time.
#[tokio::test]
async fn a_model_between_others_avoids_their_groups_and_keeps_its_worker() {
    let more = "profile: profile.yaml, handover: auto, share: {min: 6%, initial: 7%}";
    // The models with the higher priority get the groups at both ends.
    let models = [("left", 1), ("middle", 2), ("right", 1)]
        .map(|(name, priority)| format!("  - {}\n", echo(name, &format!("{more}, priority: {priority}"))));
    let home = Home::with_config(&format!("{EMULATED}models:\n{}", models.concat())).unwrap();
    home.write("profile.yaml", profile(2.0)).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let first = server.model("middle").await.unwrap().workers[0].pid;
    let loading = load(&server, "middle", 100.0, Duration::from_secs(5));
    let set = async |model: &str, groups: u32| {
        // A model that already has this share causes an error, which is ignored.
        server.resize_by_socket(model, share(groups)).await.ok();
    };
    for middle in 2..=7 {
        for left in 1..=(16 - middle) {
            // The neighbours first shrink, and then grow until none of the 17 groups is free.
            let right = 17 - middle - left;
            for (model, groups) in
                [("right", 1), ("left", 1), ("middle", middle), ("left", left), ("right", right)]
            {
                set(model, groups).await;
            }
            let between: Vec<u32> = (left..left + middle).collect();
            let there =
                |model: &ModelStatusJson| model.groups.as_deref().map(groups).as_ref() == Some(&between);
            server.wait_status("middle", "its place between both", there).await.unwrap();
        }
    }
    let middle = server.model("middle").await.unwrap();
    assert_eq!((middle.mechanism.as_str(), middle.handovers.aborted), ("in-process", 0));
    assert_eq!(middle.workers[0].pid, first);
    assert_nothing_lost(&loading.await.unwrap());
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_worker_killed_during_changes_is_replaced_at_its_share_and_nothing_is_lost() {
    let more = "handover: auto, share: {initial: 30%}, queue: {on_late: serve}, slo: 5s";
    let server = one_echo(5.0, more).await.unwrap();
    let loading = load(&server, "echo", 100.0, Duration::from_secs(8));
    let mut last = 30;
    for round in 0..40_u32 {
        let share = [50, 30, 80, 45][round as usize % 4];
        if round % 10 == 5 {
            let pid = server.model("echo").await.unwrap().workers.first().map(|worker| worker.pid);
            pid.map(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL).ok());
        }
        if server.resize_by_socket("echo", share).await.is_ok() {
            last = share;
        }
    }
    let model =
        server.wait_status("echo", "a worker that serves", |model| model.state == "ready").await.unwrap();
    assert_eq!((model.share_percent, model.mechanism.as_str()), (last, "in-process"));
    let deaths = model.more["worker_deaths"].as_u64().unwrap();
    assert!(deaths >= 3, "{deaths} deaths");
    assert_nothing_lost(&loading.await.unwrap());
    server.stop().await.unwrap();
}

#[tokio::test]
async fn on_a_small_gpu_shares_change_by_shadows_or_the_model_gives_the_reason() {
    let small = EMULATED.replace("sms: 132", "sms: 8");
    let models = ["auto", "in-process"]
        .map(|how| format!("  - {}\n", echo(how, &format!("handover: {how}, share: {{min: 25%}}"))));
    let home = Home::with_config(&format!("{small}models:\n{}", models.concat())).unwrap();
    let mut server = ServerUnderTest::start(home, None).unwrap();
    server.wait_model_ready("auto").await.unwrap();
    let unready = server.wait_status("in-process", "an end", |model| model.state == "unready").await.unwrap();
    assert!(unready.more["why"].as_str().unwrap().contains("too few or too many SMs"));
    let auto = server.wait_status("auto", "a worker", |model| model.state == "ready").await.unwrap();
    assert_eq!(auto.mechanism, "shadow");
    assert!(auto.more["no_partition"].as_str().unwrap().contains("too few or too many SMs"));
    let handover = server.resize("auto", 25).await.unwrap();
    assert_eq!((handover.mechanism.as_str(), handover.to_sms), ("shadow", 2));
    server.stop().await.unwrap();
}
