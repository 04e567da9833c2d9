//! The permitted dependencies between crates, as data.

/// The dependencies that a crate's manifest may list. Dependencies of tests and build scripts are
/// not restricted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Dependencies {
    /// The complete list of permitted dependencies.
    Only(&'static [&'static str]),
    /// The forbidden dependencies, and the exceptions that are permitted. All other dependencies
    /// are permitted.
    Without(&'static [&'static [&'static str]], &'static [&'static str]),
}

/// The permitted dependencies of each crate. Dependencies point only in the direction of the
/// arrows:
///
/// ```text
///   supervisor ─▶ operations ─▶ control ─┐
///        └──────▶ ingress ───────────────┴▶ datapath ─▶ config ─▶ policy ─▶ shared
///   simulator ─▶ config, policy, shared               worker/python ─▶ worker ─▶ shared
/// ```
pub(crate) const MANIFESTS: &[(&str, Dependencies)] = &[
    (
        "shared",
        Dependencies::Only(&[
            "half",
            "nix",
            "postcard",
            "prost",
            "rustix",
            "serde",
            "serde_bytes",
            "thiserror",
        ]),
    ),
    ("worker", Dependencies::Without(&[OWN, &["tokio", "tracing"]], &["shadowslice-shared"])),
    ("worker/python", Dependencies::Only(&["pyo3", "shadowslice-shared", "shadowslice-worker"])),
    ("supervisor/policy", Dependencies::Only(&["hdrhistogram", "shadowslice-shared", "thiserror"])),
    (
        "supervisor/config",
        Dependencies::Without(&[OWN, GPU, NETWORK], &["shadowslice-policy", "shadowslice-shared"]),
    ),
    (
        "supervisor/datapath",
        Dependencies::Without(
            &[OWN, GPU, NETWORK],
            &["shadowslice-config", "shadowslice-policy", "shadowslice-shared"],
        ),
    ),
    (
        "supervisor/ingress",
        Dependencies::Without(
            &[OWN, GPU],
            &["shadowslice-config", "shadowslice-datapath", "shadowslice-shared"],
        ),
    ),
    (
        "supervisor/control",
        Dependencies::Without(
            &[OWN, &["ort", "cudarc"], NETWORK],
            &["shadowslice-config", "shadowslice-datapath", "shadowslice-policy", "shadowslice-shared"],
        ),
    ),
    (
        "supervisor/operations",
        Dependencies::Without(
            &[OWN, GPU],
            &[
                "shadowslice-config",
                "shadowslice-control",
                "shadowslice-datapath",
                "shadowslice-policy",
                "shadowslice-shared",
            ],
        ),
    ),
    (
        "supervisor/succession",
        Dependencies::Without(
            &[OWN, GPU, NETWORK],
            &[
                "shadowslice-control",
                "shadowslice-datapath",
                "shadowslice-ingress",
                "shadowslice-operations",
                "shadowslice-shared",
            ],
        ),
    ),
    ("supervisor", Dependencies::Without(&[&["shadowslice-worker", "shadowslice-simulator"], GPU], &[])),
    (
        "benches/simulator",
        Dependencies::Only(&[
            "clap",
            "hdrhistogram",
            "rand",
            "rand_distr",
            "rand_pcg",
            "serde",
            "serde_json",
            "shadowslice-config",
            "shadowslice-policy",
            "shadowslice-shared",
            "thiserror",
        ]),
    ),
    ("tests", Dependencies::Without(&[OWN], &[])),
    ("benches", Dependencies::Without(&[&["shadowslice-worker"]], &[])),
];

/// The crates of the workspace. A rule forbids all of them and permits exceptions.
const OWN: &[&str] = &[
    "shadowslice",
    "shadowslice-config",
    "shadowslice-control",
    "shadowslice-datapath",
    "shadowslice-ingress",
    "shadowslice-operations",
    "shadowslice-policy",
    "shadowslice-python",
    "shadowslice-shared",
    "shadowslice-simulator",
    "shadowslice-succession",
    "shadowslice-worker",
];

/// The crates that use or query a GPU.
const GPU: &[&str] = &["ort", "cudarc", "nvml-wrapper"];

/// The crates that communicate with clients.
const NETWORK: &[&str] = &["hyper", "tonic"];
