//! Tests the checks with the facts of simulated hosts.

use std::path::PathBuf;

use super::check::{Check, Checks, Level};
use super::facts::*;
use super::judge::judge;
use super::requirements::{GpuClients, Requirements};
use shadowslice_config as config;
use shadowslice_config::{CudaDevice, MpsClients};
use shadowslice_control::backend::{OnnxRuntime, ProbedLibraries};
use shadowslice_control::nvml::{
    ComputeMode, CudaVersion, Gpu, GpuProcess, Identity, Memory, NvmlHost, Power, Usage,
};

const MIB: u64 = 1 << 20;

const NO_TENSORRT: &str = "Failed to load library /opt/libonnxruntime_providers_tensorrt.so with error: /opt/libonnxruntime_providers_tensorrt.so: cannot open shared object file";

fn gpu(index: u32) -> Gpu {
    Gpu {
        identity: Identity { index, uuid: format!("GPU-{index}5a7c-11"), name: "NVIDIA H200".to_owned() },
        capability: (9, 0),
        compute_mode: ComputeMode::ExclusiveProcess,
        mig: false,
        usage: Usage {
            memory: Memory { used: 4 * MIB, free: 143_000 * MIB, total: 143_771 * MIB },
            utilisation_percent: Some(0),
            power: Power::default(),
            processes: vec![GpuProcess { pid: 507, bytes: Some(500 * MIB) }],
        },
    }
}

fn problem(finding: &str) -> Problem {
    Problem { finding: finding.to_owned(), advice: "do something".to_owned() }
}

/// Returns the facts of a host with an H200 and without problems.
fn h200() -> HostFacts {
    let file = |name: &str| DeviceFile { name: name.to_owned(), open: true };
    let nvml = NvmlHost {
        driver: "580.159.04".to_owned(),
        cuda: CudaVersion { major: 13, minor: 0 },
        gpus: vec![Ok(gpu(0))],
    };
    let engine = OnnxRuntime { minor: Some(31), cuda: Ok(Some(13)), tensorrt: Err(NO_TENSORRT.to_owned()) };
    let control =
        MpsControlProgram { path: PathBuf::from("/usr/bin/nvidia-cuda-mps-control"), version: Ok(13000) };
    HostFacts {
        driver: DriverFacts {
            nvml: Ok(nvml),
            files: ["nvidia-uvm", "nvidia0", "nvidiactl"].map(file).into(),
            foreign: Vec::new(),
        },
        mps: MpsFacts { control: Some(control), server: true, foreign: Vec::new(), pipes: Vec::new() },
        system: SystemFacts {
            variables: Vec::new(),
            uid: 0,
            may_raise_priority: true,
            open_files: Some(65_536),
            locked_memory: None,
            shared_memory: Some(1024 * MIB),
            run_dir: RunDirState::Usable(PathBuf::from("/run/shadowslice")),
            worker: Ok(PathBuf::from("/opt/bin/shadowslice-worker")),
        },
        engine: EngineFacts {
            library: Ok(PathBuf::from("/opt/lib/libonnxruntime.so")),
            loaded: Some(Ok(ProbedLibraries {
                libcuda: Ok(()),
                cudnn: Ok(()),
                onnxruntime: Some(Ok(engine)),
            })),
        },
        partitions: None,
    }
}

/// Returns the facts of a new host without NVIDIA's driver and libraries.
fn plain() -> HostFacts {
    let mut facts = h200();
    facts.driver =
        DriverFacts { nvml: Err(problem("NVML cannot be loaded")), files: Vec::new(), foreign: Vec::new() };
    facts.mps = MpsFacts { control: None, server: false, foreign: Vec::new(), pipes: Vec::new() };
    loaded(&mut facts).libcuda = Err("libcuda.so.1: cannot open shared object file".to_owned());
    loaded(&mut facts).cudnn = Err("libcudnn.so.9: cannot open shared object file".to_owned());
    onnxruntime(&mut facts).cuda = Err("CUDA execution provider is not enabled in this build".to_owned());
    facts
}

fn loaded(facts: &mut HostFacts) -> &mut ProbedLibraries {
    facts.engine.loaded.as_mut().unwrap().as_mut().unwrap()
}

fn onnxruntime(facts: &mut HostFacts) -> &mut OnnxRuntime {
    loaded(facts).onnxruntime.as_mut().unwrap().as_mut().unwrap()
}

fn the_gpu(facts: &mut HostFacts) -> &mut Gpu {
    facts.driver.nvml.as_mut().unwrap().gpus[0].as_mut().unwrap()
}

/// Returns the warnings and faults in the form `level name`.
fn complaints(facts: &HostFacts, need: &Requirements) -> Vec<String> {
    let complaint = |check: Check| match check.level {
        Level::Ok => None,
        Level::Warning => Some(format!("warning {}", check.name)),
        Level::Fault => Some(format!("fault {}", check.name)),
    };
    judge(facts, need).into_iter().filter_map(complaint).collect()
}

/// Applies `change` to the facts of the H200 host. Returns the warnings and faults that result if
/// every part is required.
fn wrong(change: impl Fn(&mut HostFacts)) -> Vec<String> {
    let mut facts = h200();
    change(&mut facts);
    complaints(&facts, &Requirements::everything())
}

fn check(facts: &HostFacts, name: &str) -> Check {
    let checks = judge(facts, &Requirements::everything());
    checks.into_iter().find(|check| check.name == name).unwrap_or_else(|| panic!("no check {name}"))
}

fn emulated() -> Requirements {
    Requirements { gpus: Some(Vec::new()), mps: false, cuda: false, ..Requirements::everything() }
}

#[test]
fn an_h200_with_mps_is_fine() {
    assert_eq!(complaints(&h200(), &Requirements::everything()), Vec::<String>::new());
    let gpu = check(&h200(), "gpu 0");
    assert_eq!(gpu.finding, "NVIDIA H200, GPU-05a7c-11, 143000 of 143771 MiB free");
    assert!(check(&h200(), "cuda provider").finding.ends_with("built for CUDA 13"));
    assert_eq!(check(&h200(), "onnxruntime").finding, "version 1.31 at /opt/lib/libonnxruntime.so");
}

#[test]
fn a_host_without_a_gpu_has_each_cause_once_and_emulation() {
    let report = complaints(&plain(), &Requirements::everything());
    assert_eq!(report, ["fault driver", "fault mps", "fault cuda provider", "warning cudnn"]);
    assert!(check(&plain(), "emulated devices").finding.starts_with("work on this host"));
}

#[test]
fn a_part_that_the_configuration_does_not_need_is_no_fault() {
    assert_eq!(complaints(&plain(), &emulated()), Vec::<String>::new());
    let driver = judge(&plain(), &emulated()).into_iter().find(|check| check.name == "driver").unwrap();
    assert!(driver.finding.contains("not needed"), "{driver:?}");
    let mut facts = plain();
    facts.engine.library = Err(problem("not found"));
    assert_eq!(complaints(&facts, &emulated()), ["fault onnxruntime"]);
    let echo = Requirements { onnxruntime: false, ..emulated() };
    assert_eq!(complaints(&facts, &echo), Vec::<String>::new());
    facts.system.worker = Err(problem("no worker"));
    assert_eq!(complaints(&facts, &echo), ["fault worker"], "every configuration needs the worker");
}

#[test]
fn only_the_gpus_of_the_configuration_count() {
    let need = |device| Requirements { gpus: Some(vec![device]), ..Requirements::everything() };
    let mut facts = h200();
    let mut second = gpu(1);
    second.mig = true;
    facts.driver.nvml.as_mut().unwrap().gpus.extend([Ok(second), Err("it is lost".to_owned())]);
    assert_eq!(complaints(&facts, &Requirements::everything()), ["fault gpu 2", "fault gpu 1 mig"]);
    assert_eq!(complaints(&facts, &need(CudaDevice::Index(0))), Vec::<String>::new());
    assert_eq!(complaints(&facts, &need(CudaDevice::Uuid("GPU-15a".to_owned()))), ["fault gpu 1 mig"]);
    assert_eq!(complaints(&facts, &need(CudaDevice::Index(2))), ["fault gpu 2"]);
    assert_eq!(complaints(&facts, &need(CudaDevice::Index(3))), ["fault gpu 3"]);
    let lost = judge(&facts, &need(CudaDevice::Index(2))).into_iter().find(|check| check.name == "gpu 2");
    assert_eq!(lost.unwrap().finding, "it is lost");
}

#[test]
fn compute_modes() {
    let mode = |mode| wrong(move |facts| the_gpu(facts).compute_mode = mode);
    assert_eq!(mode(ComputeMode::Default), ["warning gpu 0 compute mode"]);
    assert_eq!(mode(ComputeMode::Unknown), ["warning gpu 0 compute mode"]);
    assert_eq!(mode(ComputeMode::Prohibited), ["fault gpu 0 compute mode"]);
}

#[test]
fn without_mps_several_processes_must_fit() {
    let need = Requirements { mps: false, ..Requirements::everything() };
    let mut facts = h200();
    assert_eq!(complaints(&facts, &need), ["fault gpu 0 compute mode"]);
    the_gpu(&mut facts).compute_mode = ComputeMode::Default;
    assert_eq!(complaints(&facts, &need), Vec::<String>::new());
}

#[test]
fn gpus_that_cannot_be_shared() {
    assert_eq!(wrong(|facts| the_gpu(facts).mig = true), ["fault gpu 0 mig"]);
    assert_eq!(wrong(|facts| the_gpu(facts).capability = (6, 1)), ["fault gpu 0"]);
    assert_eq!(wrong(|facts| facts.driver.nvml.as_mut().unwrap().gpus.clear()), ["fault gpu"]);
}

#[test]
fn other_processes_on_a_gpu_are_named() {
    let mut facts = h200();
    facts.driver.foreign = (1..9).map(|pid| ForeignProcess { pid, name: "python3".to_owned() }).collect();
    the_gpu(&mut facts).usage.processes.extend((1..9).map(|pid| GpuProcess { pid, bytes: Some(9 * MIB) }));
    let report = check(&facts, "gpu 0 processes");
    assert_eq!(report.level, Level::Warning);
    assert!(report.finding.contains("python3 (pid 1, 9 MiB)"), "{report:?}");
    assert!(report.finding.ends_with("and 3 more") && !report.finding.contains("507"), "{report:?}");
}

#[test]
fn a_driver_that_is_only_partly_there() {
    let file = |name: &'static str, open: bool| {
        move |facts: &mut HostFacts| {
            facts.driver.files.retain(|file| file.name != name);
            if !open {
                facts.driver.files.push(DeviceFile { name: name.to_owned(), open });
            }
        }
    };
    assert_eq!(wrong(|facts| loaded(facts).libcuda = Err("file too short".to_owned())), ["fault libcuda"]);
    assert_eq!(wrong(file("nvidia-uvm", true)), ["warning device files"]);
    assert_eq!(wrong(file("nvidiactl", true)), ["fault device files"]);
    assert_eq!(wrong(file("nvidia0", false)), ["fault device files"]);
    let mut facts = h200();
    facts.driver.nvml = Err(problem("driver and library are of different versions"));
    assert_eq!(complaints(&facts, &Requirements::everything()), ["fault driver"], "the files are fine");
}

#[test]
fn mps_has_both_programs_and_a_version() {
    assert_eq!(wrong(|facts| facts.mps.control = None), ["fault mps"]);
    assert_eq!(wrong(|facts| facts.mps.server = false), ["fault mps"]);
    let mute = wrong(|facts| facts.mps.control.as_mut().unwrap().version = Err("usage: ...".to_owned()));
    assert_eq!(mute, ["warning mps"]);
}

#[test]
fn foreign_daemons_are_a_fault_if_the_gpu_accepts_only_one_server() {
    let process = |kind, pid| MpsProcess { kind, pid, uid: 1000, pipes: Some("/tmp/nvidia-mps".to_owned()) };
    let with = |mode, foreign: Vec<MpsProcess>| {
        let mut facts = h200();
        the_gpu(&mut facts).compute_mode = mode;
        facts.mps.foreign = foreign;
        check(&facts, "mps daemons")
    };
    let both = vec![process(MpsKind::Control, 41), process(MpsKind::Server, 42)];
    let report = with(ComputeMode::Default, both.clone());
    assert_eq!(report.level, Level::Warning);
    let named = "daemon 41 of uid 1000 in /tmp/nvidia-mps, server 42 of uid 1000 in /tmp/nvidia-mps";
    assert!(report.finding.ends_with(named), "{report:?}");
    assert_eq!(with(ComputeMode::ExclusiveProcess, both[..1].to_vec()).level, Level::Warning);
    assert_eq!(with(ComputeMode::ExclusiveProcess, both).level, Level::Fault);
}

#[test]
fn a_dead_daemons_directory_is_to_be_removed_and_a_living_ones_is_not() {
    let pipes = |alive| PipeDirectory { path: PathBuf::from("/tmp/nvidia-mps"), alive };
    assert_eq!(wrong(|facts| facts.mps.pipes = vec![pipes(true)]), Vec::<String>::new());
    assert_eq!(wrong(|facts| facts.mps.pipes = vec![pipes(false)]), ["warning mps pipes"]);
}

#[test]
fn the_host_around_the_gpus() {
    for (variable, report) in
        [("CUDA_VISIBLE_DEVICES", "ignores it"), ("CUDA_DEVICE_MAX_CONNECTIONS", "inherit")]
    {
        let mut facts = h200();
        facts.system.variables = vec![(variable.to_owned(), "1".to_owned())];
        let check = check(&facts, "environment");
        assert!(check.level == Level::Warning && check.finding.contains(report), "{check:?}");
    }
    assert_eq!(wrong(|facts| facts.system.shared_memory = Some(64 * MIB)), ["warning shared memory"]);
    assert_eq!(wrong(|facts| facts.system.shared_memory = None), ["warning shared memory"]);
    assert_eq!(wrong(|facts| facts.system.may_raise_priority = false), ["warning cpu priority"]);
    assert_eq!(wrong(|facts| facts.system.open_files = Some(1024)), ["warning open files"]);
    assert_eq!(wrong(|facts| facts.system.open_files = None), Vec::<String>::new());
    assert_eq!(wrong(|facts| facts.system.run_dir = RunDirState::Unknown), ["fault run_dir"]);
    let path = || PathBuf::from("/run/x");
    assert_eq!(wrong(|facts| facts.system.run_dir = RunDirState::Taken(path())), Vec::<String>::new());
    let unusable = RunDirState::Unusable(path(), "read-only".to_owned());
    assert_eq!(wrong(|facts| facts.system.run_dir = unusable.clone()), ["fault run_dir"]);
}

#[test]
fn a_run_directory_may_be_too_long_for_mps_but_not_for_emulation() {
    let mut facts = h200();
    let dir = |length: usize| RunDirState::Usable(PathBuf::from(format!("/{}", "r".repeat(length - 1))));
    let below = "/private/mps63/pipe".len();
    facts.system.run_dir = dir(75 - below);
    assert_eq!(complaints(&facts, &Requirements::everything()), Vec::<String>::new());
    facts.system.run_dir = dir(75 - below + 1);
    assert_eq!(complaints(&facts, &Requirements::everything()), ["warning mps pipe directory"]);
    assert_eq!(
        check(&facts, "mps pipe directory").advice.unwrap(),
        "choose a run_dir that is 1 bytes shorter"
    );
    assert_eq!(complaints(&facts, &emulated()), Vec::<String>::new());
}

#[test]
fn an_unusable_onnx_runtime_is_a_fault() {
    let mut facts = h200();
    loaded(&mut facts).onnxruntime = Some(Err("libonnxruntime.so: file too short".to_owned()));
    assert_eq!(complaints(&facts, &Requirements::everything()), ["fault onnxruntime"]);
    assert!(check(&facts, "onnxruntime").finding.contains("file too short"));
    facts.engine.library = Err(problem("not found"));
    loaded(&mut facts).onnxruntime = None;
    assert_eq!(complaints(&facts, &Requirements::everything()), ["fault onnxruntime"]);
    assert_eq!(check(&facts, "onnxruntime").finding, "not found");
}

#[test]
fn a_missing_provider_differs_from_a_missing_library() {
    let advice = |why: &str| {
        let mut facts = h200();
        onnxruntime(&mut facts).cuda = Err(why.to_owned());
        assert_eq!(complaints(&facts, &Requirements::everything()), ["fault cuda provider"]);
        let report = check(&facts, "cuda provider");
        assert_eq!(report.finding, why);
        report.advice.unwrap()
    };
    let cpu = "CUDA execution provider is not enabled in this build";
    let own = "Failed to load library /opt/libonnxruntime_providers_cuda.so with error: /opt/libonnxruntime_providers_cuda.so: file too short";
    let other = "Failed to load library /opt/libonnxruntime_providers_cuda.so with error: libcublasLt.so.13: cannot open shared object file";
    assert!(advice(cpu).contains("ONNX Runtime for GPUs"));
    assert!(advice(own).contains("ONNX Runtime for GPUs"));
    assert!(advice(other).contains("LD_LIBRARY_PATH of `serve`"));
}

#[test]
fn a_missing_cudnn_is_a_fault_if_the_provider_cannot_be_loaded_without_it() {
    let mut facts = h200();
    let missing = "libcudnn.so.9: cannot open shared object file";
    loaded(&mut facts).cudnn = Err(missing.to_owned());
    assert_eq!(complaints(&facts, &Requirements::everything()), ["warning cudnn"]);
    onnxruntime(&mut facts).cuda = Err(format!("Failed to load it with error: {missing}"));
    assert_eq!(complaints(&facts, &Requirements::everything()), ["fault cuda provider", "fault cudnn"]);
    assert!(check(&facts, "cudnn").advice.unwrap().contains("LD_LIBRARY_PATH of `serve`"));
    let no_provider = Requirements { cuda: false, ..Requirements::everything() };
    assert_eq!(complaints(&facts, &no_provider), Vec::<String>::new());
}

#[test]
fn a_worker_that_does_not_report_its_libraries_is_a_separate_fault() {
    let mut facts = h200();
    facts.engine.loaded = Some(Err(problem("it was killed")));
    assert_eq!(complaints(&facts, &Requirements::everything()), ["fault libraries"]);
    assert_eq!(check(&facts, "libraries").finding, "it was killed");
    let echo = Requirements { onnxruntime: false, ..emulated() };
    assert_eq!(complaints(&facts, &echo), Vec::<String>::new());
    facts.engine.loaded = None;
    facts.system.worker = Err(problem("no worker"));
    assert_eq!(
        complaints(&facts, &Requirements::everything()),
        ["fault worker"],
        "the cause is reported once"
    );
}

#[test]
fn a_driver_may_be_too_old_for_the_provider() {
    let cuda = |major| wrong(move |facts| facts.driver.nvml.as_mut().unwrap().cuda.major = major);
    assert_eq!(cuda(12), ["warning partitions", "fault cuda provider"]);
    assert_eq!(cuda(14), Vec::<String>::new());
}

#[test]
fn tensorrt_matters_if_a_model_asks_for_it() {
    let wanted = Requirements { tensorrt: true, ..Requirements::everything() };
    let mut facts = h200();
    assert_eq!(complaints(&facts, &Requirements::everything()), Vec::<String>::new());
    assert_eq!(complaints(&facts, &wanted), ["fault tensorrt"]);
    let missing = "Failed to load it with error: libnvinfer.so.10: cannot open shared object file";
    onnxruntime(&mut facts).tensorrt = Err(missing.to_owned());
    assert_eq!(complaints(&facts, &wanted), ["fault tensorrt"]);
    assert!(check(&facts, "tensorrt").finding.contains("libnvinfer.so.10"));
    onnxruntime(&mut facts).tensorrt = Ok(());
    assert_eq!(complaints(&facts, &wanted), Vec::<String>::new());
}

#[test]
fn without_shares_mps_does_not_matter() {
    let mut facts = h200();
    facts.mps.control = None;
    the_gpu(&mut facts).compute_mode = ComputeMode::Default;
    assert_eq!(
        complaints(&facts, &Requirements { mps: false, ..Requirements::everything() }),
        Vec::<String>::new()
    );
}

#[test]
fn errors_are_split_into_finding_and_advice() {
    #[derive(Debug, thiserror::Error)]
    #[error("the door is shut; push; harder")]
    struct Shut(#[source] std::fmt::Error);
    let Problem { finding, advice } = Problem::of(&Shut(std::fmt::Error));
    assert_eq!(finding, format!("the door is shut: {}", std::fmt::Error));
    assert_eq!(advice, "push; harder");
}

#[test]
fn a_configuration_needs_what_its_models_need() {
    let need = |yaml: &str| {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("m.onnx"), b"\x08\x09\x3a\x07\x12\x05graph").unwrap();
        let path = folder.path().join("c.yaml");
        std::fs::write(&path, yaml).unwrap();
        Requirements::of(&config::load(&path, &|_| None, true).unwrap())
    };
    let echo =
        "{name: e, engine: emulated, slo: 20ms, tensors: [{input: x, output: y, datatype: FP32, shape: [1]}]";
    let report = |need: &Requirements| [need.gpu(), need.mps, need.onnxruntime, need.cuda, need.tensorrt];
    let onnx = |gpus: &str, more: &str| {
        need(&format!("gpus: [{gpus}]\nmodels: [{{path: m.onnx, slo: 20ms{more}}}]\n"))
    };
    assert_eq!(report(&onnx("{device: emulated}", "")), [false, false, true, false, false]);
    let real = onnx("{device: 3}", "");
    assert_eq!(real.gpus, Some(vec![CudaDevice::Index(3)]));
    assert_eq!(report(&real), [true, true, true, true, false]);
    let tensorrt = onnx("{device: 3, partition: none}", ", providers: [tensorrt]");
    assert_eq!(report(&tensorrt), [true, false, true, true, true]);
    let split = onnx("{device: emulated}, {device: 0}", ", gpu: 0");
    assert_eq!(report(&split), [true, true, true, false, false]);
    let echoes = need(&format!("gpus: [{{device: 0}}]\nmodels: [{echo}}}]\n"));
    assert_eq!(report(&echoes), [true, true, false, false, false]);
    assert!(real.descriptors > 16_384, "each connection needs a descriptor");
}

#[test]
fn lines_to_read_and_json_for_scripts() {
    let checks = vec![Check::ok("user", "root"), Check::fault("mps", "not there", "install it")];
    let report = Checks { checks };
    assert_eq!(report.lines(), "ok       user: root\nfault    mps: not there; install it");
    let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
    let report = serde_json::json!({"checks": [
        {"name": "user", "level": "ok", "finding": "root", "advice": null},
        {"name": "mps", "level": "fault", "finding": "not there", "advice": "install it"},
    ]});
    assert_eq!(json, report);
}

#[test]
fn partitions_are_reported_as_measured_and_half_precision_on_hopper() {
    let measured = |groups| {
        let mut facts = h200();
        facts.partitions = Some(vec![PartitionMeasurement { device: "0".to_owned(), groups }]);
        facts
    };
    let fine = check(&measured(Ok(Ok([vec![8; 15], vec![12]].concat()))), "partitions of GPU 0");
    assert_eq!(
        (fine.level, &*fine.finding),
        (Level::Ok, "16 groups of 132 SMs are isolated between processes")
    );
    let met = measured(Ok(Err("partitions do not keep apart (60 us alone, 3000 apart)".to_owned())));
    assert_eq!(complaints(&met, &Requirements::everything()), ["warning partitions of GPU 0"]);
    let unmeasured = measured(Err(problem("MPS does not start")));
    assert_eq!(complaints(&unmeasured, &Requirements::everything()), ["fault partitions of GPU 0"]);
    let old = |facts: &mut HostFacts| {
        facts.driver.nvml.as_mut().unwrap().cuda = CudaVersion { major: 12, minor: 2 };
    };
    assert!(wrong(old).contains(&"warning partitions".to_owned()));
    assert!(check(&h200(), "half precision").finding.contains("right with `handover: in-process`"));
    let ampere = |facts: &mut HostFacts| the_gpu(facts).capability = (8, 0);
    let mut facts = h200();
    ampere(&mut facts);
    let names: Vec<String> =
        judge(&facts, &Requirements::everything()).into_iter().map(|check| check.name).collect();
    assert!(!names.contains(&"half precision".to_owned()));
}

#[test]
fn models_that_need_more_processes_than_mps_accepts_are_a_fault() {
    let judged = |standing, shadows, minor| {
        let mut facts = h200();
        facts.driver.nvml.as_mut().unwrap().cuda.minor = minor;
        let needed = MpsClients { standing, shadows };
        let clients = vec![GpuClients { device: CudaDevice::Index(0), needed, unplaced: 0 }];
        let need = Requirements { clients, ..Requirements::everything() };
        let mut checks = judge(&facts, &need).into_iter();
        let check = checks.find(|check| check.name == "gpu 0 mps clients").unwrap();
        (check.level, check.finding)
    };
    let fits = "the models need 48 processes; MPS accepts 48 with CUDA 13.0";
    assert_eq!(judged(48, 0, 0), (Level::Ok, fits.to_owned()));
    assert_eq!(judged(48, 1, 0).0, Level::Warning, "its shadow would wait");
    assert_eq!(judged(49, 0, 0).0, Level::Fault);
    let (level, finding) = judged(49, 11, 1);
    assert_eq!(level, Level::Ok, "newer drivers accept more");
    assert!(finding.contains("and up to 11 for shadows; MPS accepts 60 with CUDA 13.1"), "{finding}");
    assert_eq!(judged(61, 0, 1).0, Level::Fault);
}
