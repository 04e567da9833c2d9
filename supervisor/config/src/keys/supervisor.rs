//! The keys of the supervisor.

use std::time::Duration;

use super::KeyDefault::{Required, Unset, Value};
use super::Kind::{Either, Flag, List, Map, Pattern, Sample, Size, Text, Whole, Word};
use super::model::MODEL;
use super::{Key, Kind, LARGEST, Words, key, names};
use crate::peers::MAX_ACCOUNTS;
use crate::types::Partitioning;

pub(crate) const STARTS: Words<bool, 2> = [("lenient", false), ("strict", true)];

/// The words of `model_control`. True means all clients.
pub(crate) const ACCESS: Words<bool, 2> = [("none", false), ("explicit", true)];

pub(crate) const PARTITIONS: Words<Partitioning, 2> =
    [("mps", Partitioning::Mps), ("none", Partitioning::None)];

/// The largest value of `limits.request_bytes` and `limits.response_bytes`, in bytes. It is
/// protobuf's limit for a message.
const MAX_MESSAGE: u64 = 2 * 1024 * 1024 * 1024;

/// The largest number of requests or connections. It only excludes mistakes.
const MAX_COUNT: i64 = 1_000_000;

/// The range of `limits.keep_alive`. The lower bound gives a client time to send its next request.
/// The upper bound limits how long the old supervisor runs after an upgrade, because the old
/// supervisor waits until idle connections time out.
const KEEP_ALIVE: Kind = Kind::Duration(Duration::from_secs(1), Duration::from_hours(1));

/// The smallest value of `workers.memory` in bytes: the host memory of a worker without a model.
const LEAST_OF_A_WORKER: u64 = 64 << 20;

const ACCOUNTS: Kind = List(&Text, 0, MAX_ACCOUNTS);

const PEERS: [Key; 2] = [
    key("users", ACCOUNTS, Unset(""), "users who can connect to a Unix socket"),
    key("groups", ACCOUNTS, Unset(""), "groups whose users can connect to a Unix socket"),
];

pub(crate) const CONFIG: Kind = Map(&[
    key(
        "run_dir",
        Text,
        Unset("/run/shadowslice for root, otherwise $XDG_RUNTIME_DIR/shadowslice"),
        "directory of the sockets",
    ),
    key("listen", Map(&LISTEN), Unset(""), "addresses of the servers"),
    key("gpus", List(&Map(&GPU), 1, 64), Value(r#"[{"device": 0, "partition": "mps"}]"#), "GPUs"),
    key("models", List(&Map(MODEL), 0, 256), Required, "models"),
    key(
        "control",
        Map(&PEERS),
        Unset("only root and the supervisor's user can run commands"),
        "users who can run commands, besides root and the supervisor's user",
    ),
    key(
        "model_control",
        Either(&[Word(&names(ACCESS)), Map(&CLIENTS)]),
        Value("none"),
        "clients that can load models",
    ),
    key("controller", Map(&CONTROLLER), Unset(""), "sharing policy"),
    key("limits", Map(&LIMITS), Unset(""), "limits"),
    key("timeouts", Map(&TIMEOUTS), Unset(""), "maximum times"),
    key("start", Word(&names(STARTS)), Value("lenient"), "what to do if a model cannot start"),
    key(
        "ready",
        Either(&[Word(&["any", "all"]), List(&Text, 1, usize::MAX)]),
        Value("any"),
        "models that must be ready before the host is ready",
    ),
    key("onnxruntime", Map(&ONNXRUNTIME), Unset(""), "ONNX Runtime"),
    key("workers", Map(&WORKERS), Unset(""), "workers"),
    key("tracing", Map(&TRACING), Unset("no request is traced"), "traces"),
    key("access_log", Text, Unset("answers are not logged"), "the file of the access log"),
]);

const LISTENERS: Kind = List(&Either(&[Text, Map(&LISTENER)]), 0, 64);

const LISTEN: [Key; 3] = [
    key("http", LISTENERS, Value(r#"["unix:http.sock"]"#), "Open Inference Protocol"),
    key("grpc", LISTENERS, Value(r#"["unix:grpc.sock"]"#), "Open Inference Protocol"),
    key("metrics", LISTENERS, Value(r#"["unix:metrics.sock"]"#), "metrics over HTTP"),
];

const LISTENER: [Key; 7] = [
    key("address", Text, Required, "unix:PATH (absolute or relative to run_dir) or IP:PORT"),
    key("mode", Pattern("^0?[0-7]{3}$"), Value(r#""0660""#), "octal file mode of a Unix socket"),
    key("group", Text, Unset(""), "group of a Unix socket"),
    key("users", ACCOUNTS, Unset("everyone"), "who can connect to a Unix socket"),
    key("groups", ACCOUNTS, Unset("everyone"), "who can connect to a Unix socket"),
    key("tls", Map(&TLS), Unset("none"), "for TCP"),
    key("tokens", Text, Unset("none"), "for TCP: a file with tokens"),
];

const TLS: [Key; 3] = [
    key("certificate", Text, Required, "PEM file of the certificate and its chain"),
    key("key", Text, Required, "PEM file of the certificate's key"),
    key("client_ca", Text, Unset("none"), "PEM file of the authority for clients' certificates"),
];

const GPU: [Key; 3] = [
    key(
        "device",
        Either(&[Whole(0, 1023), Pattern("^([0-9]{1,4}|emulated|GPU-[0-9a-fA-F-]+)$")]),
        Required,
        "a GPU",
    ),
    key("sms", Whole(2, 1024), Value("132"), "SMs of an emulated GPU"),
    key("partition", Word(&names(PARTITIONS)), Value("mps"), "how workers share the GPU"),
];

const CLIENTS: [Key; 3] = [
    key("users", ACCOUNTS, Unset(""), "users, for Unix sockets"),
    key("groups", ACCOUNTS, Unset(""), "groups, for Unix sockets"),
    key("clients", ACCOUNTS, Unset(""), "names of tokens or certificates, for TCP"),
];

const CONTROLLER: [Key; 4] = [
    key(
        "policy",
        Word(&["adaptive", "static", "adaptive+admission", "static+admission"]),
        Value("adaptive"),
        "adaptive, or static (only you change shares)",
    ),
    key("interval", Kind::from_ms(10), Value("100ms"), "time between decisions"),
    key(
        "act",
        Flag,
        Value("true"),
        "false: the policy reports decisions, but changes no share and refuses no late requests",
    ),
    key(
        "standby_memory",
        Size(1, LARGEST),
        Unset("half the GPU's memory"),
        "maximum total memory of standbys on a real GPU, as measured or from profiles",
    ),
];

const MESSAGE: Kind = Size(1, MAX_MESSAGE);
const COUNT: Kind = Whole(1, MAX_COUNT);

const LIMITS: [Key; 7] = [
    key("request_bytes", MESSAGE, Value("64Mi"), "request size, both as sent and decompressed"),
    key("response_bytes", MESSAGE, Value("64Mi"), "total size of a batch's responses"),
    key(
        "memory",
        Size(4 << 20, LARGEST),
        Unset("a quarter of the host's memory"),
        "memory of requests and responses in flight",
    ),
    key("in_flight", COUNT, Value("65536"), "requests in flight of all models together"),
    key("connections", COUNT, Value("16384"), "open connections"),
    key("keep_alive", KEEP_ALIVE, Value("75s"), "idle time of an HTTP connection"),
    key(
        "shared_memory",
        Either(&[Flag, Map(&CLIENTS)]),
        Value("false"),
        "clients that can use shared memory",
    ),
];

const TIMEOUT: Kind = Kind::from_ms(1);

const TIMEOUTS: [Key; 6] = [
    key("spawn", TIMEOUT, Value("10s"), "a new worker's first message"),
    key("warm", TIMEOUT, Value("5m"), "loading a model, running batches of all sizes and the proof"),
    key("drain", TIMEOUT, Value("10s"), "finishing the batches in flight of a replaced worker"),
    key("dwell", Kind::ANY_DURATION, Value("5s"), "keeping the old worker parked after a hand-over"),
    key("stop", TIMEOUT, Value("5s"), "a worker's exit on request"),
    key("lame_duck", Kind::ANY_DURATION, Value("0s"), "serving after SIGTERM while the host is not ready"),
];

const ONNXRUNTIME: [Key; 1] = [key(
    "library",
    Text,
    Unset("the supervisor searches for it when a model needs it"),
    "ONNX Runtime's shared library",
)];

const WORKERS: [Key; 3] = [
    key(
        "environment",
        List(&Text, 0, usize::MAX),
        Value("[]"),
        "environment variables for workers, besides those that libraries need",
    ),
    key(
        "users",
        Pattern("^ *[0-9]+ *- *[0-9]+ *$"),
        Unset("the supervisor's user"),
        "IDs for a user per model",
    ),
    key("memory", Size(LEAST_OF_A_WORKER, LARGEST), Unset("no limit"), "maximum host memory of a worker"),
];

const TRACING: [Key; 3] = [
    key("otlp", Pattern("^[Hh][Tt][Tt][Pp]://"), Required, "the collector's address"),
    key("sample", Sample, Value("1%"), "traced fraction of the requests without traceparent"),
    key("service", Text, Value("shadowslice"), "service.name of the traces"),
];
