//! Which crate may depend on which, as data.

/// What a crate's manifest may list, besides what only tests and build scripts use.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Dependencies {
    /// These and no others.
    Only(&'static [&'static str]),
    /// Any but these.
    Without(&'static [&'static str]),
}

/// Who may depend on whom.
pub(crate) const MANIFESTS: &[(&str, Dependencies)] = &[
    ("shared", Dependencies::Only(&["ipc-channel", "nix", "postcard", "serde", "thiserror"])),
    ("policy", Dependencies::Only(&["hdrhistogram", "shadowslice-shared", "thiserror"])),
    ("simulator", Dependencies::Only(&["serde", "shadowslice-policy", "shadowslice-shared", "thiserror"])),
    (
        "worker",
        Dependencies::Without(&[
            "shadowslice",
            "shadowslice-policy",
            "shadowslice-simulator",
            "tokio",
            "tracing",
        ]),
    ),
    ("supervisor", Dependencies::Without(&["shadowslice-worker", "ort", "cudarc"])),
    (
        "tests",
        Dependencies::Without(&[
            "shadowslice",
            "shadowslice-policy",
            "shadowslice-shared",
            "shadowslice-simulator",
            "shadowslice-worker",
        ]),
    ),
    ("benches", Dependencies::Without(&["shadowslice-worker"])),
];
