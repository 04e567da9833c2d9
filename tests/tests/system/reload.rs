//! Tests of configuration changes under load.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::cases::{ClientTensor, NO_OPERATORS, RequestCase};
use shadowslice_tests::client::InferGrpcClient;
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;
use tokio::task::JoinSet;

use crate::fixtures::{EMULATED, ask, assert_nothing_lost, echo, echo_case, load, profile};

const CLIENTS: u16 = 8;

/// The keys of a model that takes 2 ms per batch. The model serves late requests, because the
/// machine may be busy.
const QUICK: &str = "profile: profile.yaml, queue: {on_late: serve}";

/// Writes a configuration with these models and additional top-level keys.
fn write(home: &Home, models: &[String], more: &str) -> Result<(), HarnessError> {
    let models: String = models.iter().map(|model| format!("  - {model}\n")).collect();
    home.write("config.yaml", format!("{EMULATED}{more}models:\n{models}")).map(drop)
}

fn quick(name: &str, more: &str) -> String {
    let base = if more.contains("queue:") { "profile: profile.yaml" } else { QUICK };
    echo(name, &format!("{base}, {more}"))
}

/// Starts a server with these models, and waits until it is ready.
async fn serving(models: &[String]) -> Result<ServerUnderTest, HarnessError> {
    let home = Home::new()?;
    home.write("profile.yaml", profile(2.0))?;
    write(&home, models, "timeouts: {dwell: 100ms}\n")?;
    ServerUnderTest::start_ready(home).await
}

fn rewrite(server: &ServerUnderTest, models: &[String]) -> Result<(), HarnessError> {
    write(server.home(), models, "timeouts: {dwell: 100ms}\n")
}

/// Closed-loop clients, each with its own connection, which run until they are stopped.
struct Clients {
    stop: Arc<AtomicBool>,
    asking: JoinSet<(u64, Vec<RequestOutcome>)>,
}

impl Clients {
    fn start(server: &ServerUnderTest, model: &'static str) -> Self {
        let (stop, mut asking) = (Arc::new(AtomicBool::new(false)), JoinSet::new());
        for client in 0..CLIENTS {
            asking.spawn(ask_on(server.client(), model, client, Arc::clone(&stop)));
        }
        Self { stop, asking }
    }

    /// Stops the clients. Panics unless every request was answered correctly. Returns the number of
    /// requests.
    async fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.asking.join_all().await;
        let wrong: Vec<_> = ended.iter().flat_map(|(_, wrong)| wrong).collect();
        assert!(wrong.is_empty(), "{} requests were lost: {:?}", wrong.len(), &wrong[..wrong.len().min(5)]);
        ended.iter().map(|(right, _)| right).sum()
    }
}

async fn ask_on(
    client: InferGrpcClient,
    model: &'static str,
    seed: u16,
    stop: Arc<AtomicBool>,
) -> (u64, Vec<RequestOutcome>) {
    let (mut right, mut wrong) = (0, Vec::new());
    while !stop.load(Ordering::Relaxed) {
        let case = echo_case(seed * 1000 + u16::try_from(right % 1000).unwrap_or(0));
        match ask(client.clone(), model, &case, 0.0).await {
            RequestOutcome::Right => right += 1,
            other => wrong.push(other),
        }
    }
    (right, wrong)
}

/// Sends requests one by one until a request fails. Returns the number of correct answers before
/// the failure, and the reason for the failure.
async fn ask_until_refused(client: InferGrpcClient, seed: u16) -> (u64, String) {
    let mut right = 0;
    loop {
        match ask(client.clone(), "m", &echo_case(seed), 0.0).await {
            RequestOutcome::Right => right += 1,
            RequestOutcome::Wrong(how) => return (right, how),
            RequestOutcome::Failed(why) => return (right, why),
        }
    }
}

/// Returns the PID of the worker that serves a model.
async fn incumbent(server: &ServerUnderTest, model: &str) -> Result<i32, HarnessError> {
    let serving = |model: &ModelStatusJson| {
        let worker = model.workers.iter().find(|worker| worker.role == "incumbent");
        worker.map(|worker| worker.pid)
    };
    let seen = server.wait_status(model, "an incumbent", |model| serving(model).is_some()).await?;
    Ok(serving(&seen).unwrap_or_default())
}

#[tokio::test]
async fn changes_of_every_kind_lose_nothing() {
    let server =
        serving(&[quick("m", "share: {initial: 50%}"), quick("n", "share: {initial: 30%}")]).await.unwrap();
    let neighbour = incumbent(&server, "n").await.unwrap();
    let clients = Clients::start(&server, "m");
    let beside = Clients::start(&server, "n");
    let steps = [
        ("share: {initial: 30%}", "changed", vec!["share.initial"]),
        ("share: {initial: 30%}, priority: 2", "changed", vec!["priority"]),
        (
            "share: {initial: 30%, min: 20%, max: 60%}, standby: always",
            "changed",
            vec!["share.min", "standby"],
        ),
        ("share: {initial: 30%}, batch: {max: 8}", "replaced", vec!["batch.max"]),
        ("share: {initial: 30%}, batch: {max: 8, max_delay: 1ms}", "changed", vec!["batch.max_delay"]),
        (
            "share: {initial: 40%}, queue: {on_late: serve, max_requests: 100}",
            "replaced",
            vec!["queue.max_requests"],
        ),
        ("share: {initial: 40%}, cpus: [0]", "replaced", vec!["cpus"]),
        ("share: {initial: 60%}, handover: never, cpus: [0]", "replaced", vec!["share.initial"]),
        ("share: {initial: 60%}, handover: shadow, cpus: [0]", "changed", vec!["handover"]),
    ];
    for (keys, kind, named) in steps {
        rewrite(&server, &[quick("m", keys), quick("n", "share: {initial: 30%}")]).unwrap();
        let report = server.reload().await.unwrap();
        assert_eq!(report.changes(), [("m", kind)], "{keys}");
        assert!(named.iter().all(|key| report.models[0].keys.iter().any(|k| k == key)), "{keys}: {report:?}");
        assert_eq!(report.unchanged, 1);
    }
    assert_eq!(server.model("m").await.unwrap().share_percent, 60);
    assert!(clients.end().await > 100);
    assert!(beside.end().await > 100);
    assert_eq!(incumbent(&server, "n").await.unwrap(), neighbour, "an unchanged model is not touched");
    let alone = |model: &ModelStatusJson| model.workers.len() == 1;
    server.wait_status("m", "one worker", alone).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn models_are_added_and_removed_repeatedly() {
    let (m, n) = (quick("m", "share: {initial: 40%}"), quick("n", "share: {initial: 40%}"));
    let mut server = serving(std::slice::from_ref(&m)).await.unwrap();
    let clients = Clients::start(&server, "m");
    for round in 0..3 {
        rewrite(&server, &[n.clone(), m.clone()]).unwrap();
        assert_eq!(server.reload().await.unwrap().changes(), [("n", "added")], "round {round}");
        server.wait_model_ready("n").await.unwrap();
        assert_eq!(ask(server.client(), "n", &echo_case(1), 0.0).await, RequestOutcome::Right);
        let names: Vec<_> =
            server.status().await.unwrap().models.into_iter().map(|model| model.name).collect();
        assert_eq!(names, ["n", "m"], "in the order of the configuration");
        let last = load(&server, "n", 200.0, Duration::from_millis(200));
        assert_nothing_lost(&last.await.unwrap());
        rewrite(&server, std::slice::from_ref(&m)).unwrap();
        assert_eq!(server.reload().await.unwrap().changes(), [("n", "removed")]);
        let gone = ask(server.client(), "n", &echo_case(1), 0.0).await;
        assert!(
            matches!(&gone, RequestOutcome::Failed(why) if why.contains("unknown model: 'n'")),
            "{gone:?}"
        );
        assert!(server.model("n").await.is_err());
    }
    clients.end().await;
    server.wait_children(1).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_removed_model_answers_accepted_requests() {
    let home = Home::new().unwrap();
    home.write("profile.yaml", profile(2.0)).unwrap();
    home.write("slow.yaml", profile(300.0)).unwrap();
    let slow = echo("slow", "profile: slow.yaml, batch: {max: 1}, queue: {on_late: serve}");
    write(&home, &[slow, quick("m", "share: {initial: 30%}")], "").unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let mut asking = JoinSet::new();
    for n in 0..8 {
        let client = server.client();
        asking.spawn(async move { ask(client, "slow", &echo_case(n), 0.0).await });
    }
    server.wait_status("slow", "8 requests accepted", |model| model.requests.accepted == 8).await.unwrap();
    write(server.home(), &[quick("m", "share: {initial: 30%}")], "").unwrap();
    server.reload().await.unwrap();
    assert_eq!(asking.join_all().await, vec![RequestOutcome::Right; 8]);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn changed_inputs_get_new_workers() {
    let tensors = |shape: u32| {
        format!(
            "{{name: m, engine: emulated, slo: 200ms, {QUICK}, batch: {{max: 1}}, \
             tensors: [{{input: x, output: y, datatype: FP32, shape: [{shape}]}}]}}"
        )
    };
    let server = serving(&[tensors(16)]).await.unwrap();
    let mut asking = JoinSet::new();
    for client in 0..CLIENTS {
        asking.spawn(ask_until_refused(server.client(), client));
    }
    server.wait_status("m", "requests", |model| model.requests.succeeded > 50).await.unwrap();
    rewrite(&server, &[tensors(4)]).unwrap();
    let report = server.reload().await.unwrap();
    assert_eq!(
        (report.changes(), &report.models[0].keys),
        (vec![("m", "replaced")], &vec!["tensors".to_owned()])
    );
    let four = |name| ClientTensor::fp32(name, &[1, 4], &[7.0; 4]);
    let case = RequestCase { inputs: vec![four("x")], outputs: vec![four("y")], truth: None };
    assert_eq!(ask(server.client(), "m", &case, 0.0).await, RequestOutcome::Right);
    for (right, refused) in asking.join_all().await {
        assert!(right > 0 && refused.starts_with("InvalidArgument"), "after {right}: {refused}");
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_invalid_file_changes_nothing_and_every_error_is_reported() {
    let server = serving(&[quick("m", "share: {initial: 50%}")]).await.unwrap();
    let before = incumbent(&server, "m").await.unwrap();
    let clients = Clients::start(&server, "m");
    let bad = [
        quick("m", "share: {initial: 20%}, priority: 0"),
        quick("n", "nonsense: 1"),
        "{path: missing.onnx, slo: 50ms}".to_owned(),
    ];
    rewrite(&server, &bad).unwrap();
    let output = server.home().run(&["reload"]).await.unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(78), "{said}");
    for fault in ["models[0].priority", "models[1].nonsense", "missing.onnx", "config.yaml:7:"] {
        assert!(said.contains(fault), "{fault} is not in {said}");
    }
    for (more, key) in [("run_dir: elsewhere\n", "run_dir"), ("limits: {in_flight: 7}\n", "limits")] {
        write(
            server.home(),
            &[quick("m", "share: {initial: 20%}")],
            &format!("timeouts: {{dwell: 100ms}}\n{more}"),
        )
        .unwrap();
        let output = server.home().run(&["reload"]).await.unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(key) && said.contains("shadowslice upgrade"), "{said}");
    }
    std::fs::remove_file(server.home().path().join("config.yaml")).unwrap();
    assert_eq!(server.home().run(&["reload"]).await.unwrap().status.code(), Some(78));
    clients.end().await;
    let model = server.model("m").await.unwrap();
    assert_eq!((model.share_percent, incumbent(&server, "m").await.unwrap()), (50, before));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn concurrent_reloads_run_one_after_the_other() {
    let server = serving(&[quick("m", "share: {initial: 50%}")]).await.unwrap();
    let clients = Clients::start(&server, "m");
    rewrite(
        &server,
        &[quick("m", "share: {initial: 50%}, batch: {max: 4}"), quick("n", "share: {initial: 20%}")],
    )
    .unwrap();
    let (first, second) = tokio::join!(server.reload(), server.reload());
    let mut changes = [first.unwrap().models.len(), second.unwrap().models.len()];
    changes.sort_unstable();
    assert_eq!(changes, [0, 2], "one reload makes the changes, the other finds none");
    clients.end().await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_sighup_during_a_hand_over_waits_for_it() {
    let server = serving(&[quick("m", "share: {initial: 50%}")]).await.unwrap();
    let clients = Clients::start(&server, "m");
    rewrite(&server, &[quick("m", "share: {initial: 70%}")]).unwrap();
    let (resized, ()) = tokio::join!(server.resize("m", 20), async {
        let coming = |model: &ModelStatusJson| model.workers.len() == 2;
        server.wait_status("m", "a shadow", coming).await.unwrap();
        server.signal(Signal::SIGHUP).unwrap();
    });
    assert_eq!(resized.unwrap().outcome.as_deref(), Some("completed"));
    server.wait_status("m", "the file's share", |model| model.share_percent == 70).await.unwrap();
    // A reload that replaces the workers also waits for the end of a running hand-over.
    rewrite(&server, &[quick("m", "share: {initial: 70%}, batch: {max: 2}")]).unwrap();
    let (resized, reloaded) = tokio::join!(server.resize("m", 30), server.reload());
    assert_eq!(reloaded.unwrap().changes(), [("m", "replaced")]);
    // The resize either completed or failed together with the old workers, so its result is
    // ignored.
    drop(resized);
    clients.end().await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn killed_workers_do_not_stop_a_reload() {
    let home = Home::new().unwrap();
    // The model loads slowly, so that the test has time to kill the loading worker.
    home.write("profile.yaml", profile(2.0).replace("load: 50ms", "load: 2s")).unwrap();
    write(&home, &[quick("m", "share: {initial: 50%}")], "timeouts: {dwell: 100ms}\n").unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let clients = Clients::start(&server, "m");
    let old = incumbent(&server, "m").await.unwrap();
    rewrite(&server, &[quick("m", "share: {initial: 50%}, batch: {max: 4}")]).unwrap();
    let (reloaded, ()) = tokio::join!(server.reload(), async {
        let mut killed = 0;
        for _ in 0..2 {
            let shadow = |model: &ModelStatusJson| {
                let shadow =
                    model.workers.iter().find(|worker| worker.role == "shadow" && worker.pid != killed);
                shadow.map(|worker| worker.pid)
            };
            let seen = server.wait_status("m", "a shadow", |model| shadow(model).is_some()).await.unwrap();
            killed = shadow(&seen).unwrap();
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(killed), Signal::SIGKILL).unwrap();
        }
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(old), Signal::SIGKILL).unwrap();
    });
    assert_eq!(reloaded.unwrap().changes(), [("m", "replaced")]);
    clients.end().await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn if_new_workers_fail_the_old_ones_stay() {
    let server = serving(&[quick("m", "share: {initial: 50%}")]).await.unwrap();
    let before = incumbent(&server, "m").await.unwrap();
    let clients = Clients::start(&server, "m");
    server.home().write("nonsense.onnx", NO_OPERATORS).unwrap();
    let nonsense = "{name: m, path: nonsense.onnx, slo: 50ms, share: {initial: 50%}}".to_owned();
    rewrite(&server, &[nonsense]).unwrap();
    let output = server.home().run(&["reload", "--json"]).await.unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    // On a host without ONNX Runtime, the reason mentions ONNX Runtime instead.
    assert!(printed.contains("\"why\":\"") || said.contains("ONNX Runtime"), "{printed} {said}");
    clients.end().await;
    assert_eq!(incumbent(&server, "m").await.unwrap(), before);
    // After the operator has repaired the file, a reload must find no changes.
    rewrite(&server, &[quick("m", "share: {initial: 50%}")]).unwrap();
    assert_eq!(server.reload().await.unwrap().changes(), []);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_policy_follows_the_current_models() {
    let home = Home::new().unwrap();
    home.write("profile.yaml", profile(2.0)).unwrap();
    let yaml = |models: &[&str]| {
        let share = format!("share: {{initial: {}%}}", 100 / models.len());
        let model = |name: &&str| format!("  - {}\n", quick(name, &format!("standby: off, {share}")));
        let models: String = models.iter().map(model).collect();
        let rest = EMULATED.replace("policy: static", "policy: static+admission, interval: 50ms");
        format!("{rest}timeouts: {{dwell: 50ms}}\nmodels:\n{models}")
    };
    home.write("config.yaml", yaml(&["m"])).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let clients = Clients::start(&server, "m");
    assert_eq!(server.model("m").await.unwrap().share_percent, 100);
    server.home().write("config.yaml", yaml(&["m", "n"])).unwrap();
    assert_eq!(server.reload().await.unwrap().changes()[..], [("m", "changed"), ("n", "added")]);
    for model in ["m", "n"] {
        server.wait_status(model, "half", |model| model.share_percent == 50).await.unwrap();
    }
    server.home().write("config.yaml", yaml(&["m"])).unwrap();
    server.reload().await.unwrap();
    server.wait_status("m", "all", |model| model.share_percent == 100).await.unwrap();
    clients.end().await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn new_bounds_apply_before_the_next_decision_even_to_a_held_share() {
    let home = Home::new().unwrap();
    home.write("profile.yaml", profile(2.0)).unwrap();
    let write = |home: &Home, share: &str| {
        let model = quick("m", &format!("standby: off, share: {{{share}}}"));
        let rest = EMULATED.replace("policy: static", "policy: static+admission, interval: 1h");
        home.write("config.yaml", format!("{rest}timeouts: {{dwell: 50ms}}\nmodels:\n  - {model}\n"))
            .unwrap();
    };
    write(&home, "max: 90%");
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let clients = Clients::start(&server, "m");
    let mut held = false;
    for (bounds, percent) in
        [("max: 60%", 60), ("max: 90%", 60), ("min: 70%", 70), ("min: 2%, max: 30%", 30), ("min: 40%", 40)]
    {
        write(server.home(), bounds);
        assert_eq!(server.reload().await.unwrap().changes(), [("m", "changed")]);
        let model = server.model("m").await.unwrap();
        assert_eq!((model.share_percent, &model.more["held"]), (percent, &held.into()), "{bounds}");
        if percent == 70 {
            server.command_output(&["hold", "m"]).await.unwrap();
            held = true;
        }
    }
    clients.end().await;
    server.stop().await.unwrap();
}

/// Checks a reload whose hand-over fails under this policy. The next reload must retry the
/// hand-over. Between the two reloads, a client must still be able to load a model.
async fn assert_retried(policy: &str) -> Result<(), HarnessError> {
    let home = Home::new()?;
    // The model loads slowly, so that the test has time to kill the loading worker.
    home.write("profile.yaml", profile(2.0).replace("load: 50ms", "load: 2s"))?;
    let write = |home: &Home, most: u32| {
        let share = format!("standby: off, slo: {most}s, share: {{initial: {most}%, max: {most}%}}");
        let models = [quick("m", &share), quick("n", "standby: off, share: {initial: 20%}")]
            .map(|model| format!("  - {model}\n"));
        let rest = EMULATED.replace("policy: static", &format!("policy: {policy}"));
        let rest = format!("{rest}model_control: explicit\ntimeouts: {{dwell: 50ms}}\n");
        home.write("config.yaml", format!("{rest}models:\n{}", models.concat())).map(drop)
    };
    write(&home, 80)?;
    let server = ServerUnderTest::start_ready(home).await?;
    server.command_output(&["hold", "m"]).await?;
    let before = server.model("m").await?.share_percent;
    write(server.home(), 30)?;
    let kill_shadow = async {
        let shadow = |model: &ModelStatusJson| {
            model.workers.iter().find(|worker| worker.role == "shadow").map(|worker| worker.pid)
        };
        let seen = server.wait_status("m", "a shadow", |model| shadow(model).is_some()).await?;
        let killed = shadow(&seen).and_then(ProcessHandle::of);
        assert!(killed.is_some_and(|shadow| shadow.signal(Signal::SIGKILL).is_ok()), "{seen:?}");
        Ok::<_, HarnessError>(())
    };
    let (output, killed) = tokio::join!(server.home().run(&["reload"]), kill_shadow);
    killed?;
    assert_eq!(output?.status.code(), Some(1), "the shadow was killed");
    let left = server.model("m").await?;
    assert_eq!((left.share_percent, left.slo.latency_ms), (before, 80_000.0), "{policy}");
    assert_eq!(server.client().load("n", None).await.map_err(|status| status.to_string()), Ok(()));
    assert_eq!(server.reload().await?.changes(), [("m", "changed")], "{policy}");
    let changed = server.model("m").await?;
    assert_eq!((changed.share_percent, changed.slo.latency_ms), (30, 30_000.0), "{policy}");
    assert_eq!(server.reload().await?.changes(), []);
    server.stop().await
}

#[tokio::test]
async fn the_next_reload_retries_a_share_that_did_not_take_effect() {
    assert_retried("static").await.unwrap();
    assert_retried("static+admission, interval: 1h").await.unwrap();
}

#[tokio::test]
async fn many_reloads_leave_nothing_open() {
    let server = serving(&[quick("m", "share: {initial: 50%}")]).await.unwrap();
    let change = async |n: u32| {
        rewrite(&server, &[quick("m", &format!("share: {{initial: 50%}}, batch: {{max: {}}}", 2 + n % 3))])
            .unwrap();
        assert_eq!(server.reload().await.unwrap().changes(), [("m", "replaced")]);
    };
    change(0).await;
    server.wait_children(1).await.unwrap();
    let before = server.process().open_files();
    for n in 1..13 {
        change(n).await;
    }
    server.wait_children(1).await.unwrap();
    // If reloads leaked file descriptors, at least twelve files would be open after twelve reloads.
    // The last removed instance may still be closing its files.
    let closed = async {
        let mut tick = tokio::time::interval(Duration::from_millis(20));
        while server.process().open_files() > before + 3 {
            tick.tick().await;
        }
    };
    let closed = tokio::time::timeout(server.home().timeout(), closed).await;
    let after = server.process().open_files();
    assert!(closed.is_ok(), "{before} files were open before twelve reloads, and {after} after");
    server.stop().await.unwrap();
}
