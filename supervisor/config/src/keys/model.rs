//! The keys of a model.

use std::ops::Bound;
use std::time::Duration;

use shadowslice_shared::batch::MAX_REQUESTS;
use shadowslice_shared::tensor::Datatype;

use super::KeyDefault::{Required, Unset, Value};
use super::Kind::{Either, List, Map, Number, Open, Share, Size, Text, Whole, Word};
use super::{Key, Kind, NumberRange, Words, key, names};
use crate::engine::{EngineName, MAX_TENSORS};
use crate::types::{HandoverMode, OnLate, ProviderKind};
use crate::units::MAX_DURATION;

pub(crate) const ENGINES: Words<EngineName, 3> = [
    ("onnxruntime", EngineName::OnnxRuntime),
    ("python", EngineName::Python),
    ("emulated", EngineName::Emulated),
];

pub(crate) const PROVIDERS: Words<ProviderKind, 2> =
    [("cuda", ProviderKind::Cuda), ("tensorrt", ProviderKind::TensorRt)];

pub(crate) const HANDOVERS: Words<HandoverMode, 4> = [
    ("auto", HandoverMode::Auto),
    ("in-process", HandoverMode::InProcess),
    ("shadow", HandoverMode::Shadow),
    ("never", HandoverMode::Never),
];

pub(crate) const STANDBYS: Words<bool, 2> = [("off", false), ("always", true)];

pub(crate) const ON_LATE: Words<OnLate, 2> = [("reject", OnLate::Reject), ("serve", OnLate::Serve)];

const DATATYPES: [&str; Datatype::ALL.len()] = {
    let (mut names, mut index) = ([""; Datatype::ALL.len()], 0);
    while index < names.len() {
        names[index] = Datatype::ALL[index].name();
        index += 1;
    }
    names
};

/// The largest size of a queue's memory, or of a worker's memory on a GPU, in bytes.
pub(super) const MAX_MEMORY: u64 = 1 << 40;

/// The indices of CPU cores in `cpus`. The number of cores is the number of bits in glibc's
/// `cpu_set_t`.
const CPU: Kind = Whole(0, 1023);

const LATENCY: Kind = Kind::Duration(Duration::from_micros(1), MAX_DURATION);

const PERCENTILE: NumberRange = NumberRange {
    wanted: "a percentage from 1 to below 100 (for example 99 or 99.9)",
    least: Bound::Included(1.0),
    most: Bound::Excluded(100.0),
};

const NUMBER: Kind =
    Number(NumberRange { wanted: "a number", least: Bound::Unbounded, most: Bound::Unbounded });

pub(super) const MODEL: &[Key] = &[
    key("name", Text, Unset("the stem of path"), "unique name"),
    key("engine", Word(&names(ENGINES)), Unset("from the suffix of path"), "the runtime"),
    key("path", Text, Unset(""), "the model's file"),
    key("threads", Whole(1, 1024), Value("1"), "CPU threads per operator"),
    key(
        "providers",
        List(&Word(&names(PROVIDERS)), 1, usize::MAX),
        Value(r#"["cuda"]"#),
        "ONNX execution providers on a real GPU, in order of preference",
    ),
    key("python", Map(&PYTHON), Unset(""), "the interpreter"),
    key("tensors", List(&Map(&TENSOR), 1, MAX_TENSORS), Unset(""), "input and output pairs"),
    key("gpu", Either(&[Word(&["auto"]), Whole(0, 1023)]), Value("0"), "the GPU"),
    key("profile", Text, Unset("no profile"), "the model's costs"),
    key("share", Map(&SHARE), Unset(""), "the share of the GPU"),
    key("slo", Either(&[LATENCY, Map(&SLO)]), Required, "maximum time from arrival to answer"),
    key("batch", Map(&BATCH), Unset(""), "batches"),
    key("queue", Map(&QUEUE), Unset(""), "waiting requests"),
    key("priority", Whole(1, 1000), Value("1"), "1 is the highest"),
    key("handover", Word(&names(HANDOVERS)), Value("auto"), "how the share changes"),
    key("standby", Word(&names(STANDBYS)), Value("off"), "a warm standby worker"),
    key("cpus", List(&CPU, 0, usize::MAX), Value("[]"), "CPU cores to which workers are pinned"),
    key("memory", Map(&MEMORY), Unset(""), "memory"),
    key("warmup", Either(&[Text, Open(&[], &WARMUP)]), Value("{}"), "inputs for the warm-up"),
];

/// The keys of the configuration that a client sends with the protocol's `load` call.
pub(crate) const CLIENT_CHANGES: Kind = Map(&[
    key("share", Either(&[Share, Map(&SHARE)]), Unset(""), "the share of the GPU"),
    key("slo", Either(&[LATENCY, Map(&SLO)]), Unset(""), "maximum time from arrival to answer"),
]);

const PYTHON: [Key; 1] = [key("executable", Text, Unset("python3 on the PATH"), "the interpreter")];

const TENSOR: [Key; 4] = [
    key("input", Text, Required, "the name of the input"),
    key("output", Text, Required, "the name of the output"),
    key("datatype", Word(&DATATYPES), Required, "the datatype of both"),
    key("shape", List(&Whole(-1, i32::MAX as i64), 0, 32), Required, "the shape without the batch"),
];

const SHARE: [Key; 3] = [
    key(
        "initial",
        Share,
        Unset("max under adaptive; otherwise models divide the rest of their GPU equally"),
        "the share at the start, from min to max",
    ),
    key("min", Share, Unset("2 SMs"), "bounds of the share"),
    key("max", Share, Value("100%"), "bounds of the share"),
];

const SLO: [Key; 2] = [
    key("latency", LATENCY, Required, "maximum time from arrival to answer"),
    key("percentile", Number(PERCENTILE), Value("99"), "percentage of requests that must meet slo.latency"),
];

const BATCH: [Key; 3] = [
    key(
        "max",
        Whole(0, MAX_REQUESTS as i64),
        Unset("32 if the model has a batch axis, otherwise 0"),
        "maximum batch size",
    ),
    key(
        "sizes",
        List(&Whole(1, MAX_REQUESTS as i64), 1, usize::MAX),
        Unset("powers of two, and max"),
        "batch sizes to warm up, ascending to max",
    ),
    key(
        "max_delay",
        Kind::ANY_DURATION,
        Value("0ms"),
        "maximum time that a request waits for a larger batch",
    ),
];

const QUEUE: [Key; 3] = [
    key("max_requests", Whole(1, 1_000_000), Value("1024"), "maximum number of waiting requests"),
    key(
        "memory",
        Size(1, MAX_MEMORY),
        Value("256Mi"),
        "maximum memory for tensors of waiting and running requests",
    ),
    key("on_late", Word(&names(ON_LATE)), Value("reject"), "reject or serve late requests"),
];

const MEMORY: [Key; 1] =
    [key("limit", Size(1 << 20, MAX_MEMORY), Unset("no limit"), "maximum GPU memory of a worker")];

const WARMUP: Kind = Either(&[Text, Kind::SHAPE, Map(&INPUT)]);

const INPUT: [Key; 4] = [
    key("shape", Kind::SHAPE, Unset(""), "the shape of one row"),
    key("values", Either(&[Text, List(&Text, 1, usize::MAX)]), Unset(""), "elements, repeated as necessary"),
    key("range", List(&NUMBER, 2, 2), Unset(""), "the smallest and the largest element"),
    key("file", Text, Unset(""), "an array with its shape and values"),
];
