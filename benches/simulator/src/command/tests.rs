use std::fs;

use clap::Parser;

use super::*;

fn parsed(arguments: &str) -> Result<SimulateOptions, clap::Error> {
    SimulateOptions::try_parse_from(["simulate"].into_iter().chain(arguments.split_whitespace()))
}

fn simulated(arguments: &str) -> Result<SimulationReport, SimulateError> {
    simulate(&parsed(arguments).unwrap())
}

const MIX: &str = "../../configs/mix.yaml";

#[test]
fn every_policy_runs_on_the_same_requests() {
    let report = simulated(&format!(
        "{MIX} --load poisson step --policy static half gslice+admission --seed 3 4 --seconds 5"
    ))
    .unwrap();
    let runs: Vec<_> = report.runs.iter().map(|run| (&*run.load, run.seed, &*run.policy)).collect();
    assert_eq!(runs.len(), 12);
    assert_eq!(runs[0], ("poisson", 3, "static"));
    assert_eq!(runs[11], ("step", 4, "gslice+admission"));
    assert!(report.runs[..3].iter().all(|run| run.offered_rps == report.runs[0].offered_rps));
    for run in &report.runs {
        assert!(run.goodput_rps <= run.offered_rps && (0.0..=1.0).contains(&run.attainment));
        assert_eq!(run.per_model.len(), 7);
    }
}

#[test]
fn the_names_in_json_do_not_change() {
    let report = simulated(&format!("{MIX} --load surge --policy equal --seconds 2")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    let run = &json["runs"][0];
    for name in
        ["policy", "load", "seed", "offered_rps", "goodput_rps", "attainment", "p99_ms", "repartitions"]
    {
        assert!(!run[name].is_null(), "{name}");
    }
    assert_eq!(run["per_model"]["bert"]["priority"], 1);
    let table = table::of(&report.runs);
    assert!(table.starts_with("LOAD") && table.contains("\nbert "), "{table}");
}

#[test]
fn another_truth_changes_the_result() {
    let mean_ms = |more: &str| {
        let report =
            simulated(&format!("{MIX} --load poisson --policy unpartitioned --seconds 10 {more}")).unwrap();
        report.runs[0].per_model["bert"].mean_ms
    };
    let plain = mean_ms("");
    assert_eq!(plain, mean_ms("--truth profile --belief profile"));
    assert_ne!(plain, mean_ms("--truth noise"));
    assert_ne!(plain, mean_ms("--truth form,scale"));
}

#[test]
fn models_that_need_much_bandwidth_slow_each_other_down_unless_disabled() {
    let folder = tempfile::tempdir().unwrap();
    let profile =
        "{source: {kind: illustrative}, bandwidth: 0.9, execution_ms: {sms: [66, 132], 1: [4.0, 3.9]}}";
    fs::write(folder.path().join("profile.yaml"), profile).unwrap();
    let model = |name: &str| {
        format!(
            "{{name: {name}, engine: emulated, profile: profile.yaml, slo: 50ms, share: {{initial: 50%}}, \
             tensors: [{{input: x, output: y, datatype: FP32, shape: [1]}}]}}"
        )
    };
    let config = folder.path().join("config.yaml");
    let text = format!("gpus: [{{device: emulated, sms: 132}}]\nmodels: [{}, {}]", model("a"), model("b"));
    fs::write(&config, text).unwrap();
    let mean_ms = |more: &str| {
        let config = config.display();
        let run = format!("{config} --load poisson --policy static --seconds 10 {more}");
        simulated(&run).unwrap().runs[0].per_model["a"].mean_ms
    };
    assert!(mean_ms("") > mean_ms("--no-interference"));
}

#[test]
fn a_file_is_replayed_and_its_errors_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("load.csv");
    let replay = |text: &str, more: &str| {
        fs::write(&path, text).unwrap();
        simulated(&format!("{MIX} --policy static --load {} {more}", path.display()))
    };
    let run = |text, more| replay(text, more).unwrap().runs[0].clone();
    assert_eq!(run("0.5,bert\n1.5,bert\n2,ranker\n", "").offered_rps, 1.5);
    assert_eq!(run("0.5,bert\n1.5,bert\n2,ranker\n", "--seconds 1").offered_rps, 1.0);
    assert_eq!(run("0,bert\n", "").per_model["bert"].answered, 1);
    let fault = |text| errors::chain(&replay(text, "").unwrap_err());
    let backwards = fault("1,bert\n0,bert");
    assert!(
        backwards.ends_with("line 2: time goes back from 1 s to 0 s; sort the lines by time"),
        "{backwards}"
    );
    assert!(fault("1,berta").contains("unknown model \"berta\""));
    assert!(fault("").contains("has no arrival; write one"));
    let later = errors::chain(&replay("2.5,bert\n3,bert", "--seconds 2").unwrap_err());
    assert!(
        later.contains("no arrival before 2 s, and the first one is at 2.5 s; increase --seconds"),
        "{later}"
    );
    assert!(errors::chain(&replay("", "--seconds 2").unwrap_err()).contains("has no arrival; write one"));
    let missing = simulated(&format!("{MIX} --load /nowhere/load.csv")).unwrap_err();
    assert!(matches!(missing, SimulateError::Load(LoadError::Read { .. })));
}

#[test]
fn written_arrivals_give_the_same_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("load.csv");
    let drawn =
        format!("{MIX} --load gamma --seed 5 --seconds 3 --policy half --write-arrivals {}", path.display());
    let again = format!("{MIX} --load {} --seconds 3 --policy half", path.display());
    let [drawn, again] = [drawn, again].map(|arguments| simulated(&arguments).unwrap().runs.remove(0));
    assert_eq!(drawn.per_model, again.per_model);
    let fault = |arguments: &str| {
        let given = format!("{MIX} --policy static --load poisson --seconds 1 {arguments}");
        errors::chain(&simulated(&given).unwrap_err())
    };
    let several = fault(&format!("--seed 1 2 --write-arrivals {}", path.display()));
    assert!(several.contains("one load and one seed"), "{several}");
    assert!(fault("--write-arrivals /nowhere/load.csv").starts_with("cannot write /nowhere/load.csv"));
}

#[test]
fn exit_codes_distinguish_an_invalid_load_from_an_unreadable_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let code = |arguments: &str| run(&parsed(&format!("{MIX} --policy static {arguments}")).unwrap());
    fs::write(file("empty.csv"), "").unwrap();
    fs::write(file("nonsense.csv"), "soon,bert").unwrap();
    // The file is sparse, so its 5 GiB take no disk space.
    fs::File::create(file("long.csv")).unwrap().set_len(5 << 30).unwrap();
    for wrong in ["empty.csv", "nonsense.csv", "long.csv"] {
        assert_eq!(code(&format!("--load {}", file(wrong))), exit::USAGE, "{wrong}");
    }
    assert_eq!(code(&format!("--load {}", file("missing.csv"))), exit::UNAVAILABLE);
    std::os::unix::fs::symlink("/dev/full", file("full.csv")).unwrap();
    let written = format!("--load poisson --seconds 1 --write-arrivals {}", file("full.csv"));
    assert_eq!(code(&written), exit::UNAVAILABLE);
    assert_eq!(code(&format!("{written} --seed 1 2")), exit::USAGE);
}

#[test]
fn configurations_that_cannot_be_simulated_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    let why = |gpu: &str, model: &str| {
        let tensors = "tensors: [{input: x, output: y, datatype: FP32, shape: [1]}]";
        let text = format!(
            "gpus: [{{{gpu}}}]\nmodels: [{{name: m, engine: emulated, {tensors}, slo: 20ms, {model}}}]"
        );
        fs::write(&path, text).unwrap();
        errors::chain(&simulated(&format!("{} --load poisson", path.display())).unwrap_err())
    };
    let emulated = "device: emulated, sms: 132";
    assert!(why(emulated, "priority: 1").contains("has no profile"));
    assert!(why(emulated, "profile: nowhere.yaml").contains("nowhere.yaml"));
    assert!(why(emulated, "slo: 20").contains("slo"));
}

#[test]
fn results_show_wakes_if_models_may_sleep() {
    let folder = tempfile::tempdir().unwrap();
    let memory = "{context: 1Gi, weights: 1Gi, activations: 0}";
    let execution = "{sms: [132], 1: [4.0]}";
    let profile = format!("{{source: {{kind: illustrative}}, memory: {memory}, execution_ms: {execution}}}");
    fs::write(folder.path().join("profile.yaml"), profile).unwrap();
    let run = |more: &str| {
        let model = |name: &str| {
            let tensors = "[{input: x, output: y, datatype: FP32, shape: [1]}]";
            format!(
                "{{name: {name}, engine: emulated, profile: profile.yaml, slo: 1s, tensors: {tensors}{more}}}"
            )
        };
        let gpus = "[{device: emulated, sms: 132, memory: 3Gi}]";
        let models = ["a", "b", "c"].map(model).join(", ");
        let config = folder.path().join("config.yaml");
        fs::write(&config, format!("gpus: {gpus}\nmodels: [{models}]")).unwrap();
        let arguments = "--load poisson --utilisation 0.02 --policy static --seconds 20";
        let report = simulated(&format!("{} {arguments}", config.display())).unwrap();
        let sleep = report.runs[0].per_model["b"].sleep;
        (sleep, table::of(&report.runs), serde_json::to_string(&report).unwrap())
    };
    let (sleep, table, json) = run("");
    assert!(sleep.is_none() && !table.contains("WAK") && !json.contains("sleep"), "{table}");
    let (sleep, table, json) = run(", isolation: shared, sleep: on-pressure");
    let sleep = sleep.unwrap();
    assert!(sleep.wakes > 10 && table.contains("WAKING") && json.contains("\"wakes\""), "{table}");
    assert!((sleep.waking - sleep.wakes as f64 * 0.0231 / 20.0).abs() < 1e-3, "{sleep:?}");
    let (sleep, ..) = run(", isolation: shared, worker: own, sleep: {after: 500ms}");
    assert!(sleep.unwrap().wakes > 0);
    // Without a shared process, the contexts fill the memory, and no model can wake.
    assert_eq!(run(", sleep: on-pressure").0.unwrap().wakes, 0);
}

#[test]
fn nonsense_on_the_command_line_is_refused() {
    for nonsense in [
        "",
        "--load possion",
        "--load poisson --policy best",
        "--load poisson --seconds 0",
        "--load poisson --seconds nan",
        "--load poisson --utilisation -1",
        "--load poisson --truth noises",
        "--load poisson --belief noise",
        "--load poisson --seed -1",
        "--load poisson --write-arrivals load.txt",
    ] {
        assert!(parsed(&format!("{MIX} {nonsense}")).is_err(), "{nonsense}");
    }
    for (nonsense, advice) in [("--seconds -1", "above 0"), ("--utilisation -0.5", "a fraction of the GPU")] {
        let fault = parsed(&format!("{MIX} --load poisson {nonsense}")).unwrap_err();
        assert!(fault.to_string().contains(advice), "{fault}");
    }
    assert_eq!(parsed(&format!("{MIX} --load poisson")).unwrap().policy[0].to_string(), "adaptive");
}

#[test]
fn a_model_with_few_requests_gets_room_next_to_a_busy_one() {
    let dir = tempfile::tempdir().unwrap();
    let configs = std::env::current_dir().unwrap().join("../../configs/profiles");
    let model = |name: &str, profile: &str, slo: &str, batch: u32, priority: u32| {
        let tensors = "[{input: x, output: y, datatype: FP32, shape: [64]}]";
        let profile = configs.join(profile);
        let profile = profile.display();
        format!(
            "  - {{name: {name}, engine: emulated, tensors: {tensors}, profile: '{profile}', slo: {slo}, batch: {{max: {batch}}}, priority: {priority}}}\n"
        )
    };
    let config = dir.path().join("config.yaml");
    // Neither model has priority 1, so the workers of both have the same client priority.
    let urgent = model("urgent", "bert-base.yaml", "3ms", 8, 2);
    let hog = model("hog", "vgg19.yaml", "100ms", 16, 3);
    fs::write(&config, format!("gpus: [{{device: emulated, sms: 132}}]\nmodels:\n{urgent}{hog}")).unwrap();
    // The load has 30 requests per second for one model and 2,300 for the other, at random times.
    let mut random = 1_u64;
    let mut within_a_minute = |_| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % 60_000_000
    };
    let mut arrivals: Vec<(u64, &str)> = (0..60 * 30).map(|nth| (within_a_minute(nth), "urgent")).collect();
    arrivals.extend((0..60 * 2_300).map(|nth| (within_a_minute(nth), "hog")));
    arrivals.sort_unstable();
    let lines: String =
        arrivals.iter().map(|(us, name)| format!("{:.6},{name}\n", *us as f64 / 1e6)).collect();
    let load = dir.path().join("load.csv");
    fs::write(&load, lines).unwrap();
    let (config, load) = (config.display(), load.display());
    let options = format!("{config} --load {load} --seconds 60 --policy unpartitioned adaptive");
    let report = simulated(&options).unwrap();
    let kept = |run: usize, model: &str| {
        let model = &report.runs[run].per_model[model];
        model.goodput_rps / model.offered_rps
    };
    let urgent = [0, 1].map(|run| kept(run, "urgent"));
    assert!(urgent[0] < 0.85, "their kernels take turns: {urgent:?}");
    assert!(urgent[1] > 0.97, "{urgent:?}");
    // Half of the GPU is enough to answer about 90 % of the hog's requests in time.
    assert!(kept(1, "hog") > 0.8);
}

#[test]
fn a_layout_is_kept_with_admission_for_the_whole_run() {
    let run = |policies: &str| {
        let load = "--load surge --utilisation 1.5 --seconds 5 --no-interference";
        simulated(&format!("{MIX} {load} --policy {policies}")).map(|report| report.runs)
    };
    let runs = run("half layouts layout:halves").unwrap();
    let names: Vec<&str> = runs.iter().map(|run| &*run.policy).collect();
    assert!(names.len() > 4 && names[1..].iter().all(|name| name.starts_with("layout:")), "{names:?}");
    let halves: Vec<&SimulationRun> = runs.iter().filter(|run| run.policy == "layout:halves").collect();
    assert_eq!(halves.len(), 2);
    assert_eq!(halves[0], halves[1], "`layout:halves` is the same layout");
    for run in &runs[1..] {
        assert!(run.per_model.values().any(|model| model.refused > 0), "{}", run.policy);
        assert!(run.repartitions <= 7, "{} moves models at the start only", run.policy);
        assert_eq!(run.bound_rps, runs[0].bound_rps);
    }
    let unknown = run("layout:fifths").unwrap_err();
    assert!(matches!(unknown, SimulateError::Layout(_)));
    assert!(unknown.to_string().contains("halves"), "{unknown}");
}

#[test]
fn a_trace_has_a_line_when_something_changes() {
    let facts = |ms| shadowslice_policy::sharing::PolicyInput {
        now: shadowslice_shared::units::Timestamp::after_origin(std::time::Duration::from_millis(ms)),
        gpus: Vec::new(),
        models: Vec::new(),
    };
    use shadowslice_policy::sharing::{AdmissionPolicy, Decision, MissRate, Verdict, VerdictReason};
    let verdict = |actual| Verdict {
        from: shadowslice_shared::units::Sms(10),
        to: shadowslice_shared::units::Sms(10),
        blocked_by: None,
        why: if actual > 0.1 {
            VerdictReason::Violating(MissRate { actual, allowed: 0.1 })
        } else {
            VerdictReason::Met(MissRate { actual, allowed: 0.1 })
        },
    };
    let decision = |parts: [f64; 2]| Decision {
        changes: Vec::new(),
        admissions: vec![AdmissionPolicy::accept_all(1); 2],
        report: parts.map(verdict).to_vec(),
    };
    let names = ["a", "b"].map(str::to_owned);
    let mut trace = Trace::default();
    let mut lines = |ms, parts| trace.lines(&facts(ms), &decision(parts), &names);
    assert_eq!(lines(100, [0.0, 0.0]), ["   0.100 s  met: a, b"]);
    assert_eq!(lines(200, [0.0, 0.05]), Vec::<String>::new());
    assert_eq!(lines(300, [0.0, 0.2]), ["   0.300 s  violating: b"]);
}

#[test]
fn both_suffixes_for_admission_control_name_the_same_policy() {
    let policy = |name: &str| parsed(&format!("{MIX} --load poisson --policy {name}")).unwrap().policy;
    assert_eq!(policy("half+admission"), policy("half+doors"));
    assert_eq!(policy("half+doors")[0].to_string(), "half+admission");
    assert_ne!(policy("half+admission"), policy("half"));
}

#[test]
fn only_adaptive_pauses_batches_unless_its_name_or_the_configuration_forbids_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.yaml");
    let model = |name: &str, ms: f64, slo: &str, priority: u32| {
        let profile = format!("{name}-profile.yaml");
        let text = format!("{{source: {{kind: illustrative}}, execution_ms: {{sms: [132], 1: [{ms}]}}}}");
        fs::write(dir.path().join(&profile), text).unwrap();
        let tensors = "[{input: x, output: y, datatype: FP32, shape: [1]}]";
        let spec = format!("profile: {profile}, slo: {slo}, priority: {priority}, batch: {{max: 1}}");
        format!("{{name: {name}, engine: emulated, tensors: {tensors}, {spec}}}")
    };
    let pauses = |controller: &str, policies: &str| {
        let models = [model("hog", 8.0, "100ms", 2), model("urgent", 1.0, "5ms", 1)].join(", ");
        let gpus = "[{device: emulated, sms: 132}]";
        fs::write(&path, format!("gpus: {gpus}\nmodels: [{models}]\n{controller}")).unwrap();
        let load = format!("{} --load poisson --seconds 5", path.display());
        let runs = simulated(&format!("{load} --policy {policies}")).unwrap().runs;
        runs.iter().map(|run| (run.policy.clone(), run.per_model["hog"].pauses.is_some())).collect::<Vec<_>>()
    };
    let policies = [
        ("adaptive", true),
        ("adaptive+no-preemption", false),
        ("adaptive+admission+no-preemption", false),
        ("static", false),
        ("static+admission", false),
        ("unpartitioned", false),
    ];
    let names = policies.map(|(name, _)| name).join(" ");
    assert_eq!(pauses("", &names), policies.map(|(name, pauses)| (name.to_owned(), pauses)));
    assert!(!pauses("controller: {preempt: false}", "adaptive")[0].1);
    for nonsense in ["static+no-preemption", "half+no-preemption", "adaptive+no-preemption+no-preemption"] {
        assert!(parsed(&format!("{MIX} --load poisson --policy {nonsense}")).is_err(), "{nonsense}");
    }
}
