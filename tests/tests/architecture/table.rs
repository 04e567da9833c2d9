//! The rules for modules, unsafe code and the length of files, in the form of data.

/// The modules and crates that a part of the workspace may use. A row applies to the files whose
/// path begins with its `part`. If several rows match, only the row with the longest `part`
/// applies. A file without a matching row has no rule.
///
/// `may` applies to paths that begin with `crate` or the name of a workspace crate. If the path is
/// outside the part itself, the path must begin with an entry of `may`. `never` applies to all
/// other paths.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) part: &'static str,
    pub(crate) may: &'static [&'static str],
    pub(crate) never: &'static [&'static str],
}

/// The paths of clocks. Code under this rule gets the time from its caller as a `Timestamp`.
const NO_CLOCK: &[&str] = &["std::time::Instant", "std::time::SystemTime", "nix::time", "tokio::time"];

/// The paths that have side effects or access external state.
const PURE: &[&str] = &[
    "std::time::Instant",
    "std::time::SystemTime",
    "std::env",
    "std::fs",
    "std::io",
    "std::net",
    "std::os",
    "std::process",
    "std::sync",
    "std::thread",
];

/// The crates that use or query a GPU.
const NO_GPU: &[&str] = &["ort", "cudarc", "nvml_wrapper"];

/// The crates that the manifest of the crate `control` permits.
const ALL: &[&str] =
    &["crate", "shadowslice_config", "shadowslice_datapath", "shadowslice_policy", "shadowslice_shared"];

const OPERATIONS: &[&str] =
    &["crate", "shadowslice_config", "shadowslice_control", "shadowslice_datapath", "shadowslice_shared"];

/// The rules for parts of crates. The rules between crates are in [`super::manifests`].
pub(crate) const ROWS: &[Row] = &[
    // The crate `shared` contains the formats and types that the supervisor and the workers share.
    Row { part: "shared/src", may: &["crate"], never: NO_CLOCK },
    // In a worker, only engines and devices use CUDA and ONNX Runtime. An engine may use a real
    // GPU, but a device must not use an engine.
    Row { part: "worker/src", may: &["crate", "shadowslice_shared", "shadowslice_worker"], never: NO_GPU },
    Row {
        part: "worker/src/engine",
        may: &["crate::answer", "crate::device::cuda", "crate::inputs", "shadowslice_shared"],
        never: &["cudarc"],
    },
    // The crate `worker/python` builds the worker as a Python extension module.
    Row {
        part: "worker/python/src",
        may: &["crate", "shadowslice_shared", "shadowslice_worker", "pyo3"],
        never: NO_GPU,
    },
    Row { part: "worker/src/device", may: &["crate::clock", "shadowslice_shared"], never: &["ort"] },
    // The policy decides without I/O, so it must not use slabs, sockets or processes.
    Row {
        part: "supervisor/policy/src",
        may: &[
            "crate",
            "shadowslice_shared::batch",
            "shadowslice_shared::boot",
            "shadowslice_shared::contention",
            "shadowslice_shared::groups",
            "shadowslice_shared::pause",
            "shadowslice_shared::ids",
            "shadowslice_shared::units",
            "shadowslice_shared::profile",
        ],
        never: PURE,
    },
    // Each floor of ingress uses only the floors below it. Other floors can reach only the names that
    // a floor exports in its `mod.rs`.
    Row {
        part: "supervisor/ingress/src/api",
        may: &[
            "crate::admission",
            "crate::proto",
            "crate::tensors",
            "crate::transport",
            "shadowslice_config",
            "shadowslice_datapath",
            "shadowslice_shared",
        ],
        never: &["std::net", "tokio::net", "tokio_rustls"],
    },
    Row {
        part: "supervisor/ingress/src/tensors",
        may: &["crate::admission", "crate::proto", "shadowslice_datapath", "shadowslice_shared"],
        never: &["hyper", "std::net", "tokio::net", "tokio_rustls"],
    },
    Row {
        part: "supervisor/ingress/src/transport",
        may: &["crate::admission", "shadowslice_config", "shadowslice_datapath"],
        never: &["prost", "serde", "serde_json"],
    },
    Row {
        part: "supervisor/ingress/src/admission",
        may: &["shadowslice_datapath"],
        never: &["prost", "serde", "serde_json", "tokio_rustls"],
    },
    // The simulator is pure like the policy. Only its command may read files.
    Row {
        part: "benches/simulator/src",
        may: &["crate", "shadowslice_policy", "shadowslice_shared"],
        never: PURE,
    },
    Row {
        part: "benches/simulator/src/command",
        may: &["shadowslice_config", "shadowslice_policy", "shadowslice_shared", "shadowslice_simulator"],
        never: NO_CLOCK,
    },
    Row { part: "benches/simulator/src/main.rs", may: &["crate"], never: NO_CLOCK },
    // The planner calls the policy and sends orders. It does not start workers, route requests or
    // stop workers itself.
    Row {
        part: "supervisor/control/src/controller/planner",
        may: &[
            "crate::controller",
            "crate::backend::GpuBackend",
            "shadowslice_config",
            "shadowslice_datapath",
            "shadowslice_policy::backoff",
            "shadowslice_policy::sharing",
            "shadowslice_shared",
        ],
        never: NO_GPU,
    },
    // These parts compute results only from their arguments: the standbys that yield, the changes of
    // a new configuration, the missing parts of a host, and the texts of metrics and traces.
    Row { part: "supervisor/control/src/controller/standbys.rs", may: &["crate::backend::gib"], never: PURE },
    Row { part: "supervisor/control/src/models/config_diff.rs", may: ALL, never: PURE },
    Row {
        part: "supervisor/operations/src/doctor/judge",
        may: &[
            "crate::doctor::check",
            "crate::doctor::facts",
            "crate::doctor::requirements",
            "shadowslice_config",
            "shadowslice_control",
        ],
        never: PURE,
    },
    Row {
        part: "supervisor/operations/src/metrics",
        may: &["crate", "shadowslice_control", "shadowslice_datapath"],
        never: PURE,
    },
    Row {
        part: "supervisor/operations/src/otlp/spans.rs",
        may: &["crate::otlp", "shadowslice_datapath", "shadowslice_shared"],
        never: PURE,
    },
    // The display of `top` is pure. Only `run.rs` queries the supervisor and draws the screen.
    Row {
        part: "supervisor/operations/src/top",
        may: &["crate", "shadowslice_control", "shadowslice_datapath", "shadowslice_shared"],
        never: PURE,
    },
    Row { part: "supervisor/operations/src/top/run.rs", may: OPERATIONS, never: &[] },
    // Whole-system tests use binaries, sockets and documents in the same way as users.
    Row { part: "tests/src", may: &["crate", "shadowslice_tests"], never: &["ort", "cudarc"] },
    // The policy evaluation is pure. The files that simulate, read profiles and write results are
    // exceptions.
    Row {
        part: "benches/src/policy_eval",
        may: &[
            "crate::report::number",
            "crate::report::table",
            "crate::report::verdict",
            "shadowslice_simulator::results",
        ],
        never: PURE,
    },
    Row { part: "benches/src/policy_eval/mod.rs", may: &["crate"], never: NO_CLOCK },
    Row {
        part: "benches/src/policy_eval/profiles.rs",
        may: &["crate::policy_eval::mixes", "shadowslice_config"],
        never: NO_CLOCK,
    },
    Row {
        part: "benches/src/policy_eval/simulate.rs",
        may: &["crate::policy_eval::mixes", "crate::policy_eval::profiles", "shadowslice_simulator::results"],
        never: NO_CLOCK,
    },
];

/// The only files that may contain `unsafe` code.
pub(crate) const UNSAFE: &[&str] = &[
    "shared/src/slab.rs",
    "supervisor/control/src/process/spawn.rs",
    "supervisor/datapath/src/peer/groups.rs",
    "supervisor/datapath/src/pipeline/workers/socket.rs",
    "supervisor/succession/src/predecessor.rs",
    "worker/src/descriptors.rs",
    "worker/src/cuda_runtime.rs",
    "worker/src/device/cuda/arena.rs",
    "worker/src/device/cuda/buffer.rs",
    "worker/src/device/cuda/graph.rs",
    "worker/src/device/cuda/pause.rs",
    "worker/src/device/cuda/pieces.rs",
    "worker/src/device/cuda/isolation.rs",
    "worker/src/device/cuda/mod.rs",
    "worker/src/device/cuda/open.rs",
    "worker/src/device/cuda/paced.rs",
    "worker/src/device/cuda/partition.rs",
    "worker/src/device/cuda/pinned.rs",
    "worker/src/device/cuda/pinned_file.rs",
    "worker/src/device/cuda/region.rs",
    "worker/src/device/cuda/saved.rs",
    "worker/src/device/cuda/facts.rs",
    "worker/python/src/allocator.rs",
    "worker/python/src/host.rs",
    "worker/src/engine/onnxruntime/bound.rs",
    "worker/src/engine/onnxruntime/on_gpu.rs",
    "worker/src/engine/fetch.rs",
    "worker/src/engine/hosted_sleep.rs",
    "worker/src/engine/recorded.rs",
    "worker/src/engine/onnxruntime/output.rs",
    "worker/src/engine/onnxruntime/providers.rs",
    "worker/src/engine/onnxruntime/scratch.rs",
    "worker/src/engine/onnxruntime/sleep.rs",
    "worker/src/engine/onnxruntime/weights.rs",
    "worker/src/engine/onnxruntime/strings.rs",
    "worker/src/engine/onnxruntime/tensor.rs",
];

/// The maximum number of lines of a file.
pub(crate) const MAX_LINES: usize = 500;

/// The maximum number of lines of code of each crate that operators run, without blank lines, comments
/// and tests. A feature that needs more raises the limit on purpose.
pub(crate) const MAX_CODE_LINES: &[(&str, usize)] = &[
    ("shared", 2100),
    ("worker", 8850),
    ("worker/python", 300),
    ("supervisor", 2500),
    ("supervisor/config", 4700),
    ("supervisor/control", 12000),
    ("supervisor/datapath", 6700),
    ("supervisor/ingress", 8550),
    ("supervisor/operations", 7200),
    ("supervisor/policy", 7750),
    ("supervisor/succession", 650),
];

/// The maximum difference between the limit of a crate and its code in lines. If the difference is
/// larger, the limit must be lowered.
pub(crate) const MAX_SPARE_LINES: usize = 100;
