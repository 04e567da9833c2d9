//! The rules, as data.

/// What one part of the workspace may use. A file belongs to the row with the longest `part` that its
/// path starts with, and every file below a crate's `src` belongs to one.
///
/// `may` is about the workspace itself: whatever is not the part's own and starts with `crate`, or with
/// the name of one of the workspace's crates, must start with one of these. `never` is about all other paths.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) part: &'static str,
    pub(crate) may: &'static [&'static str],
    pub(crate) never: &'static [&'static str],
}

/// Clocks. Time comes in as a `Moment`.
const NO_CLOCK: &[&str] = &["std::time::Instant", "std::time::SystemTime", "nix::time", "tokio::time"];

/// All that reaches out of a pure function.
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

/// What can reach a GPU, or only ask about it.
const NO_GPU: &[&str] = &["ort", "cudarc", "nvml_wrapper"];

/// Who may use whom.
pub(crate) const ROWS: &[Row] = &[
    // What supervisor and workers agree on.
    Row { part: "shared/src", may: &["crate"], never: NO_CLOCK },
    // Decisions. None of them reads a slab, speaks to a process or knows a wire.
    Row {
        part: "policy/src",
        may: &[
            "crate",
            "shadowslice_shared::groups",
            "shadowslice_shared::units",
            "shadowslice_shared::profile",
        ],
        never: PURE,
    },
    // Simulated worlds around them, as pure as they are: files are read by who asks for a simulation.
    Row { part: "simulator/src", may: &["crate", "shadowslice_policy", "shadowslice_shared"], never: PURE },
    // A worker. CUDA and ONNX Runtime only where the model runs; an engine knows a real GPU, and no device an engine.
    Row { part: "worker/src", may: &["crate", "shadowslice_shared", "shadowslice_worker"], never: NO_GPU },
    Row {
        part: "worker/src/engine",
        may: &[
            "crate::answer",
            "crate::device::cuda",
            "crate::errors",
            "crate::inputs",
            "shadowslice_shared",
        ],
        never: &["cudarc"],
    },
    Row {
        part: "worker/src/device",
        may: &["crate::clock", "crate::errors", "shadowslice_shared"],
        never: &["ort"],
    },
    // The supervisor's data path: from a socket to a lane. It never waits for control, so it cannot name it.
    Row {
        part: "supervisor/src/ingress",
        may: &[
            "crate::config",
            "crate::pipeline",
            "crate::repository",
            "crate::router",
            "crate::trace::Journal",
            "crate::trace::Outcome",
            "crate::trace::Protocol",
            "crate::trace::Span",
            "crate::trace::Tracer",
            "shadowslice_shared::tensor",
        ],
        never: NO_GPU,
    },
    // What happens to traced requests, noted by the data path. It knows nobody who notes, nor who sends it on.
    Row {
        part: "supervisor/src/trace",
        may: &["crate::clock::Clock", "crate::config::Sample", "shadowslice_shared::units"],
        never: NO_GPU,
    },
    // From there to a collector, on a thread of its own.
    Row {
        part: "supervisor/src/otlp",
        may: &[
            "crate::clock::Clock",
            "crate::config::Tracing",
            "crate::errors",
            "crate::trace",
            "shadowslice_shared::units",
        ],
        never: NO_GPU,
    },
    // Making spans of it is pure.
    Row {
        part: "supervisor/src/otlp/spans.rs",
        may: &["crate::otlp::attributes", "crate::otlp::proto", "crate::trace", "shadowslice_shared::units"],
        never: PURE,
    },
    Row { part: "supervisor/src/router.rs", may: &["crate::pipeline::Pipeline"], never: NO_GPU },
    // What clients may know of the models and want of them. It names neither side.
    Row { part: "supervisor/src/repository.rs", may: &[], never: NO_GPU },
    // Which models there are: it makes them from the parts, shows them to both sides, and serves nothing itself.
    Row {
        part: "supervisor/src/models",
        may: &[
            "crate::config",
            "crate::control",
            "crate::errors",
            "crate::host::onnxruntime_library",
            "crate::models",
            "crate::partition::Gpus",
            "crate::pipeline",
            "crate::process::ReferenceError",
            "crate::process::ReferenceFile",
            "crate::repository",
            "crate::router",
            "crate::trace::Sampling",
            "shadowslice_shared::slab::SlabError",
            "shadowslice_shared::units",
        ],
        never: &["ort", "cudarc", "nvml_wrapper", "hyper", "tonic", "ipc_channel"],
    },
    Row {
        part: "supervisor/src/models/plan.rs",
        may: &["crate::config", "shadowslice_shared::units"],
        never: PURE,
    },
    Row {
        part: "supervisor/src/pipeline",
        may: &[
            "crate::clock",
            "crate::errors",
            "crate::process::BatchSocket",
            "crate::trace::Ending",
            "crate::trace::Handover",
            "crate::trace::InBatch",
            "crate::trace::Journal",
            "crate::trace::Lost",
            "crate::trace::Place",
            "shadowslice_policy::blame",
            "shadowslice_policy::latency",
            "shadowslice_policy::scheduler",
            "shadowslice_policy::sharing::Door",
            "shadowslice_policy::sharing::Seen",
            "shadowslice_shared",
        ],
        never: &["ort", "cudarc", "hyper", "tonic", "ipc_channel"],
    },
    // The supervisor's control: from an order or a death to processes and routes.
    Row {
        part: "supervisor/src/control",
        may: &[
            "crate::clock",
            "crate::config",
            "crate::errors",
            "crate::nvml::Readings",
            "crate::partition",
            "crate::pipeline",
            "crate::process",
            "shadowslice_policy::groups",
            "shadowslice_policy::handover",
            "shadowslice_policy::restart",
            "shadowslice_shared",
        ],
        never: &["ort", "cudarc", "hyper", "tonic", "ipc_channel"],
    },
    // It asks the policy and gives orders; it starts, routes and stops nothing itself.
    Row {
        part: "supervisor/src/control/planner",
        may: &[
            "crate::clock",
            "crate::config",
            "crate::control",
            "crate::partition::Partition",
            "crate::pipeline::LatencyHistogram",
            "crate::pipeline::Pipeline",
            "shadowslice_policy::sharing",
            "shadowslice_shared::groups::Groups",
            "shadowslice_shared::units",
        ],
        never: &["ort", "cudarc", "hyper", "tonic", "ipc_channel", "shadowslice_policy::handover"],
    },
    Row {
        part: "supervisor/src/process",
        may: &[
            "crate::partition::Admission",
            "crate::partition::Grant",
            "crate::partition::inherited_settings",
            "crate::pipeline::Pipeline",
            "crate::pipeline::WorkerId",
            "shadowslice_shared",
        ],
        never: NO_GPU,
    },
    Row {
        part: "supervisor/src/partition",
        may: &[
            "crate::errors",
            "crate::partition",
            "crate::pipeline::Crowding",
            "crate::process::Inherited",
            "crate::process::close_on_exec",
            "shadowslice_shared",
        ],
        never: NO_GPU,
    },
    // What people see and say. They know control's reports and orders, and not what it does.
    Row {
        part: "supervisor/src/admin",
        may: &[
            "crate::config::Controller",
            "crate::control::Cause",
            "crate::control::HandoverReport",
            "crate::control::ModelPlan",
            "crate::control::Order",
            "crate::control::PlanReport",
            "crate::control::Planned",
            "crate::control::ResizeRefused",
            "crate::control::WorkerStanding",
            "crate::models",
            "crate::nvml::Readings",
            "crate::nvml::Watched",
            "crate::partition::Partition",
            "crate::status",
            "shadowslice_shared::units",
        ],
        never: NO_GPU,
    },
    Row {
        part: "supervisor/src/status.rs",
        may: &[
            "crate::config::Model",
            "crate::control::Handovers",
            "crate::control::ModelPlan",
            "crate::control::ModelState",
            "crate::control::Standing",
            "crate::nvml::Watched",
            "crate::partition::GpuStanding",
            "crate::partition::Partition",
            "crate::pipeline::Counts",
            "crate::pipeline::Pipeline",
            "crate::pipeline::Report",
            "shadowslice_shared::groups::Division",
        ],
        never: NO_GPU,
    },
    Row {
        part: "supervisor/src/status",
        may: &[
            "crate::control::ModelPlan",
            "crate::control::PlanReport",
            "crate::control::WorkerStanding",
            "crate::nvml::Memory",
            "crate::nvml::Reading",
            "crate::nvml::Watched",
            "crate::partition::gib",
            "crate::status::GpuStatus",
            "crate::status::aligned",
        ],
        never: NO_GPU,
    },
    Row {
        part: "supervisor/src/metrics",
        may: &[
            "crate::control::Changes",
            "crate::control::Outcomes",
            "crate::machine::MachineUsage",
            "crate::pipeline::Durations",
            "crate::pipeline::LatencyHistogram",
            "crate::pipeline::RowsHistogram",
            "crate::pipeline::Totals",
            "crate::status",
            "crate::trace::Counted",
        ],
        never: PURE,
    },
    // What NVIDIA's driver says of GPUs. It opens no CUDA context.
    Row { part: "supervisor/src/nvml", may: &["crate::config", "crate::errors"], never: &["ort", "cudarc"] },
    Row {
        part: "supervisor/src/cli.rs",
        may: &[
            "crate::admin",
            "crate::config",
            "crate::control::HandoverReport",
            "crate::doctor",
            "crate::errors",
            "crate::exit",
            "crate::models::ModelChange",
            "crate::models::Report",
            "crate::profile",
            "crate::serve",
            "crate::simulate",
            "crate::status",
        ],
        never: NO_GPU,
    },
    // What a model costs: workers as they serve, without clients.
    Row {
        part: "supervisor/src/profile",
        may: &[
            "crate::clock",
            "crate::config",
            "crate::control::engine_spec",
            "crate::control::warm_up",
            "crate::errors",
            "crate::exit",
            "crate::host",
            "crate::nvml",
            "crate::partition",
            "crate::pipeline::WorkerId",
            "crate::process",
            "shadowslice_shared",
        ],
        never: NO_GPU,
    },
    // What a host offers. Judging it is apart from looking at it, and pure.
    Row {
        part: "supervisor/src/doctor",
        may: &["crate::config", "crate::errors", "crate::exit", "crate::nvml"],
        never: NO_GPU,
    },
    Row {
        part: "supervisor/src/doctor/gather",
        may: &[
            "crate::admin::SOCKET",
            "crate::config",
            "crate::doctor::facts",
            "crate::errors",
            "crate::host",
            "crate::nvml",
            "crate::partition::control_program",
            "crate::process::may_raise_priority",
            "crate::process::temporary_folder",
        ],
        never: NO_GPU,
    },
    Row {
        part: "supervisor/src/doctor/judge",
        may: &[
            "crate::config::CudaDevice",
            "crate::doctor::check",
            "crate::doctor::facts",
            "crate::doctor::need",
            "crate::nvml::ComputeMode",
            "crate::nvml::CudaVersion",
            "crate::nvml::Gpu",
            "crate::nvml::Host",
        ],
        never: PURE,
    },
    // What-if. It serves nobody.
    Row {
        part: "supervisor/src/simulate",
        may: &[
            "crate::config",
            "shadowslice_policy::sharing",
            "shadowslice_shared::groups",
            "shadowslice_shared::profile",
            "shadowslice_shared::units",
            "shadowslice_simulator",
        ],
        never: NO_GPU,
    },
    Row {
        part: "supervisor/src/simulate.rs",
        may: &[
            "crate::config",
            "crate::errors",
            "crate::exit",
            "shadowslice_policy::sharing",
            "shadowslice_simulator",
        ],
        never: NO_GPU,
    },
    // What all may use knows nothing of them.
    Row {
        part: "supervisor/src/config",
        may: &[
            "shadowslice_policy::handover::Timeouts",
            "shadowslice_policy::sharing::Choice",
            "shadowslice_policy::sharing::Kind",
            "shadowslice_policy::sharing::Terms",
            "shadowslice_shared",
        ],
        never: NO_GPU,
    },
    Row { part: "supervisor/src/clock.rs", may: &["shadowslice_shared::units"], never: NO_GPU },
    Row {
        part: "supervisor/src/machine.rs",
        may: &["crate::clock::Clock", "shadowslice_shared::units"],
        never: NO_GPU,
    },
    Row { part: "supervisor/src/errors.rs", may: &[], never: NO_GPU },
    Row { part: "supervisor/src/exit.rs", may: &[], never: NO_GPU },
    Row {
        part: "supervisor/src/host.rs",
        may: &[
            "crate::config",
            "crate::nvml",
            "crate::partition",
            "shadowslice_shared::slab",
            "shadowslice_shared::units",
        ],
        never: NO_GPU,
    },
    // The wiring: the only file that knows both data path and control.
    Row { part: "supervisor/src/serve.rs", may: &["crate", "shadowslice_shared"], never: NO_GPU },
    Row { part: "supervisor/src/lib.rs", may: &[], never: NO_GPU },
    Row { part: "supervisor/src/main.rs", may: &["shadowslice::cli"], never: NO_GPU },
    // Whole-system tests see binaries, sockets and documents, as users do.
    Row { part: "tests/src", may: &["crate", "shadowslice_tests"], never: &["ort", "cudarc"] },
    // Benchmarks may look at anything.
    Row {
        part: "benches/src",
        may: &["crate", "shadowslice", "shadowslice_policy", "shadowslice_shared", "shadowslice_tests"],
        never: &[],
    },
    // Programs that are one function of the library's.
    Row { part: "benches/src/bin/costs.rs", may: &["shadowslice_benches::costs"], never: &[] },
    Row { part: "benches/src/bin/growth.rs", may: &["shadowslice_benches::growth"], never: &[] },
    // The simulator beside the real thing: both as users have them, from outside.
    Row {
        part: "benches/src/bin/beside",
        may: &[
            "crate",
            "shadowslice_benches::machine",
            "shadowslice_benches::table",
            "shadowslice_simulator::results",
            "shadowslice_tests",
        ],
        never: &[],
    },
    // This server beside another one: both as users have them, from outside.
    Row {
        part: "benches/src/bin/versus",
        may: &["crate", "shadowslice_benches", "shadowslice_tests"],
        never: &[],
    },
    // Judging is pure but for the files that simulate, read profiles and write.
    Row {
        part: "benches/src/bin/judge",
        may: &["crate", "shadowslice_benches::table", "shadowslice_simulator::results"],
        never: PURE,
    },
    Row { part: "benches/src/bin/judge/main.rs", may: &["crate"], never: NO_CLOCK },
    Row {
        part: "benches/src/bin/judge/profiles.rs",
        may: &["crate::mixes", "shadowslice::config"],
        never: NO_CLOCK,
    },
    Row {
        part: "benches/src/bin/judge/simulate.rs",
        may: &["crate::mixes", "crate::profiles", "shadowslice_simulator::results"],
        never: NO_CLOCK,
    },
];

/// The files that may hold `unsafe` code, all of which do.
pub(crate) const UNSAFE: &[&str] = &[
    "shared/src/slab.rs",
    "supervisor/src/pipeline/alarm.rs",
    "supervisor/src/process/socket.rs",
    "supervisor/src/process/spawn.rs",
    "worker/src/descriptors.rs",
    "worker/src/device/cuda/buffer.rs",
    "worker/src/device/cuda/graph.rs",
    "worker/src/device/cuda/isolation.rs",
    "worker/src/device/cuda/mod.rs",
    "worker/src/device/cuda/open.rs",
    "worker/src/device/cuda/partition.rs",
    "worker/src/device/cuda/pinned.rs",
    "worker/src/device/cuda/trials.rs",
    "worker/src/engine/onnxruntime/bound.rs",
    "worker/src/engine/onnxruntime/on_gpu.rs",
    "worker/src/engine/onnxruntime/output.rs",
    "worker/src/engine/onnxruntime/providers.rs",
    "worker/src/engine/onnxruntime/strings.rs",
];

/// The most lines of a file.
pub(crate) const MAX_LINES: usize = 500;
