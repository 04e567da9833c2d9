//! Benchmarks of the structures that every request passes through: queue, messages, slabs and batch
//! sockets.

use std::hint::black_box;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};
use shadowslice_datapath::pipeline::BatchSocket;
use shadowslice_policy::scheduler::batcher::{self, BatchLimits, NextBatch};
use shadowslice_policy::scheduler::queue::{QueuedRequest, RequestQueue};
use shadowslice_policy::tenants::TenantId;
use shadowslice_shared::batch::{
    Batch, BatchAnswer, BatchOutput, BatchRequest, Command, Extent, MAX_MESSAGE_BYTES, WorkerMessage, decode,
    encode,
};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::slab::{AnswerSlab, AnswerWriter, ReadableSlab, WritableSlab};
use shadowslice_shared::units::Timestamp;

/// A request with the same costs as those that the supervisor queues. It shares the shapes of its
/// inputs with other requests, and its item is as large as in the supervisor.
type Request = QueuedRequest<Arc<[Vec<i64>]>, [u64; 8]>;

const SLO: Duration = Duration::from_millis(20);

/// The tensor sizes to measure, in bytes.
const SIZES: [u64; 4] = [64, 4096, 65_536, 600_000];

fn request(number: u64) -> Request {
    let arrived = Timestamp::after_origin(Duration::from_micros(number));
    QueuedRequest {
        shape: Arc::new([vec![16]]),
        rows: 1,
        arrived,
        deadline: arrived + SLO,
        expires: None,
        level: 1,
        tenant: TenantId::DEFAULT,
        alone: false,
        item: [number; 8],
    }
}

fn queue_of(depth: u64) -> RequestQueue<Arc<[Vec<i64>]>, [u64; 8]> {
    let mut queue = RequestQueue::default();
    for number in 0..depth {
        queue.push(request(number));
    }
    queue
}

/// Measures the time to push and take one request, and a batch of 32 requests, while other requests
/// wait in the queue.
fn queue(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("queue+batcher");
    for depth in [1, 100, 1000] {
        for batch in [1, 32] {
            let limits = BatchLimits { max_rows: batch, max_requests: 1024, max_delay: Duration::ZERO };
            let mut queue = queue_of(depth);
            let mut number = depth;
            let name = format!("push {batch} and take a batch of {batch}");
            group.bench_function(BenchmarkId::new(name, format!("depth {depth}")), |bencher| {
                bencher.iter_batched(
                    || {
                        number += u64::from(batch);
                        (number..).map(request).take(batch as usize).collect::<Vec<_>>()
                    },
                    |requests| {
                        for request in requests {
                            queue.push(request);
                        }
                        let now = Timestamp::after_origin(Duration::ZERO);
                        let NextBatch::Run(taken) = batcher::next(&mut queue, &limits, None, now) else {
                            unreachable!("requests wait, and the maximum delay is zero")
                        };
                        taken
                    },
                    BatchSize::SmallInput,
                );
            });
        }
    }
    group.finish();
}

/// Measures the time to encode and decode the messages between supervisor and worker.
fn messages(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("messages");
    let mut buffer = vec![0; MAX_MESSAGE_BYTES];
    for requests in [1, 32] {
        let extents = || (0..requests).map(|place| Extent { offset: place * 64, len: 64 });
        let batch = Command::Run(Batch {
            id: 123_456,
            slot: 1,
            groups: Groups::WHOLE,
            sent_ns: 1_234_567_890_123,
            shapes: vec![vec![16]],
            requests: extents().map(|extent| BatchRequest { rows: 1, inputs: vec![extent] }).collect(),
            optional: Vec::new(),
        });
        let output = BatchOutput { shape: vec![16], parts: extents().collect() };
        let answer = WorkerMessage::Answer(BatchAnswer {
            id: 123_456,
            execution_us: 1234,
            result: Ok(vec![output]),
            more: false,
        });

        group.bench_function(BenchmarkId::new("encode a batch", requests), |bencher| {
            bencher.iter(|| encode(black_box(&batch), &mut buffer).map(<[u8]>::len));
        });
        let batch = encoded(&batch);
        group.bench_function(BenchmarkId::new("decode a batch", requests), |bencher| {
            bencher.iter(|| decode::<Command>(black_box(&batch)));
        });
        group.bench_function(BenchmarkId::new("encode an answer", requests), |bencher| {
            bencher.iter(|| encode(black_box(&answer), &mut buffer).map(<[u8]>::len));
        });
        let answer = encoded(&answer);
        group.bench_function(BenchmarkId::new("decode an answer", requests), |bencher| {
            bencher.iter(|| decode::<WorkerMessage>(black_box(&answer)));
        });
    }
    group.finish();
}

fn encoded<M: serde::Serialize>(message: &M) -> Vec<u8> {
    let mut buffer = vec![0; MAX_MESSAGE_BYTES];
    encode(message, &mut buffer).expect("the message fits into the buffer").to_vec()
}

/// Measures three copies of a tensor: into the request slab, from the request slab to the answer
/// slab, and out of the answer slab.
fn slabs(criterion: &mut Criterion) {
    const BYTES: u64 = 1 << 20;
    let requests = WritableSlab::create("bench-requests", BYTES).expect("a memory file");
    let readable = ReadableSlab::map(requests.as_fd(), BYTES).expect("its mapping");
    let answers = AnswerSlab::create("bench-answers", BYTES).expect("a memory file");
    let writer = AnswerWriter::map(answers.as_fd(), BYTES).expect("its mapping");
    let mut group = criterion.benchmark_group("slabs");
    for size in SIZES {
        let tensor = vec![7; size as usize];
        group.throughput(Throughput::Bytes(size));
        group.bench_function(BenchmarkId::new("write a request", size), |bencher| {
            bencher.iter(|| requests.write(0, black_box(&tensor)));
        });
        group.bench_function(BenchmarkId::new("echo", size), |bencher| {
            bencher.iter(|| {
                writer.write(0, readable.bytes(0, black_box(size)).expect("the tensor is inside the slab"))
            });
        });
        group.bench_function(BenchmarkId::new("copy an answer", size), |bencher| {
            bencher.iter(|| answers.copy(0, black_box(size)));
        });
    }
    group.finish();
}

/// Measures the round trip of a message between the reactor and a thread. The thread blocks on its
/// socket in the same way as a worker.
fn socket(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (ours, theirs) = {
        let _inside = runtime.enter();
        BatchSocket::pair().expect("a socket pair")
    };
    let worker = std::thread::spawn(move || echo(&theirs));
    let mut message = vec![0; MAX_MESSAGE_BYTES];
    for size in [64, 1024] {
        let bytes = vec![7; size];
        criterion.bench_function(&format!("batch socket/round trip/{size}"), |bencher| {
            bencher.iter(|| {
                send(ours.as_raw_fd(), &bytes, MsgFlags::MSG_NOSIGNAL).expect("the other thread takes it");
                runtime.block_on(ours.receive(&mut message)).expect("the other thread answers")
            });
        });
    }
    ours.close();
    worker.join().expect("the thread ends when the socket is closed");
}

fn echo(socket: &OwnedFd) {
    let mut message = vec![0; MAX_MESSAGE_BYTES];
    loop {
        match recv(socket.as_raw_fd(), &mut message, MsgFlags::empty()) {
            Ok(0) | Err(Errno::ECONNRESET) => break,
            Ok(length) if send(socket.as_raw_fd(), &message[..length], MsgFlags::MSG_NOSIGNAL).is_ok() => {}
            _ => break,
        }
    }
}

fn short_runs() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .sample_size(50)
}

criterion_group! { name = structures; config = short_runs(); targets = queue, messages, slabs, socket }
criterion_main!(structures);
