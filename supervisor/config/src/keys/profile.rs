//! The keys of a profile.

use std::ops::Bound;

use super::KeyDefault::{Required, Unset, Value};
use super::Kind::{List, Map, Number, Open, Size, Text, Whole, Word};
use super::model::MAX_MEMORY;
use super::{Key, Kind, NumberRange, key};

const BANDWIDTH: NumberRange = NumberRange {
    wanted: "a number from 0 to 1 (for example 0.2)",
    least: Bound::Included(0.0),
    most: Bound::Included(1.0),
};

const MILLISECONDS: NumberRange = NumberRange {
    wanted: "a time in milliseconds above 0 (for example 2.5)",
    least: Bound::Excluded(0.0),
    most: Bound::Unbounded,
};

pub(crate) const PROFILE: Kind = Map(&[
    key("source", Map(&SOURCE), Required, "illustrative, or measured with device, driver and date"),
    key("memory", Map(&MEMORY), Unset(""), "GPU memory of a worker"),
    key("start", Map(&START), Unset(""), "times of start, load and warm-up"),
    key(
        "bandwidth",
        Number(BANDWIDTH),
        Value("0"),
        "fraction of the memory bandwidth that the model alone uses",
    ),
    key(
        "kernels",
        Whole(1, 1_000_000),
        Unset("the time of a one-row batch divided by 5 us"),
        "kernels per batch",
    ),
    key("shapes", Open(&[], &Kind::SHAPE), Unset(""), "measured input shapes"),
    key("execution_ms", Open(&EXECUTION, &ROW), Required, "times of a batch of N rows, in ms"),
]);

const SOURCE: [Key; 4] = [
    key("kind", Word(&["illustrative", "measured"]), Required, "illustrative, or measured"),
    key("device", Text, Unset(""), "the GPU"),
    key("driver", Text, Unset(""), "the version of the driver"),
    key("date", Text, Unset(""), "the date of the measurement"),
];

const BYTES: Kind = Size(0, MAX_MEMORY);

const MEMORY: [Key; 3] = [
    key("context", BYTES, Value("0"), "CUDA context"),
    key("weights", BYTES, Value("0"), "weights"),
    key("activations", BYTES, Value("0"), "activations"),
];

const START: [Key; 3] = [
    key("process", Kind::ANY_DURATION, Value("0ms"), "start of the process"),
    key("load", Kind::ANY_DURATION, Value("0ms"), "load of the model"),
    key("warm", Kind::ANY_DURATION, Value("0ms"), "warm-up"),
];

const EXECUTION: [Key; 1] =
    [key("sms", List(&Whole(1, 1_000_000), 0, usize::MAX), Required, "SMs of each column, ascending")];

const ROW: Kind = List(&Number(MILLISECONDS), 0, usize::MAX);
