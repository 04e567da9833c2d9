//! Tests a pipeline with simulated workers. Some of these workers are faulty or die.

mod admission;
mod blocked;
mod bounds;
mod cache;
mod delivery;
mod ended;
mod hangs;
mod journal;
mod misses;
mod pauses;
mod request_options;
mod sleep;
mod steps;
mod streams;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use nix::sys::socket::{MsgFlags, recv, send};
use shadowslice_policy::sharing::AdmissionPolicy;
use shadowslice_shared::batch::{
    self, Batch, BatchAnswer, BatchOutput, Command, Extent, MAX_MESSAGE_BYTES, PartitionReply, RunFailure,
    WorkerMessage,
};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::profile::{Execution, ExecutionRow, ProcessMemory, ProfileSource, StartTimes};
use shadowslice_shared::slab::{AnswerSlab, AnswerWriter};
use shadowslice_shared::tensor::{Datatype, TensorSpec};
use shadowslice_shared::units::{Percent, Sms};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use self::delivery::written;
use super::*;
use crate::pipeline::BatchSocket;
use crate::pipeline::workers::WorkerLink;

/// The time for which the supervisor appears to have run when a test starts.
const UPTIME: Duration = Duration::from_secs(30);

const SLAB_BYTES: u64 = 4096;
const STEP_TIMEOUT: Duration = Duration::from_secs(10);
const MEMORY_BYTES: usize = 1 << 16;

/// A simulated worker at the other end of a lane.
struct Actor {
    socket: OwnedFd,
    slab: AnswerWriter,
}

impl Actor {
    /// Receives the next command on a thread that may block.
    async fn command(&self) -> Command {
        let socket = self.socket.try_clone().unwrap();
        let received = tokio::task::spawn_blocking(move || {
            let mut message = vec![0; MAX_MESSAGE_BYTES];
            let length = recv(socket.as_raw_fd(), &mut message, MsgFlags::empty()).unwrap();
            batch::decode::<Command>(&message[..length]).unwrap()
        });
        tokio::time::timeout(Duration::from_secs(10), received).await.unwrap().unwrap()
    }

    /// Receives the next command. Panics if it is not a batch.
    async fn batch(&self) -> Batch {
        match self.command().await {
            Command::Run(batch) => batch,
            other => panic!("{other:?} instead of a batch"),
        }
    }

    fn send_bytes(&self, bytes: &[u8]) {
        send(self.socket.as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL).unwrap();
    }

    fn report(&self, report: &WorkerMessage) {
        let mut message = vec![0; MAX_MESSAGE_BYTES];
        self.send_bytes(batch::encode(report, &mut message).unwrap());
    }

    fn answer(&self, id: u64, result: Result<Vec<BatchOutput>, RunFailure>) {
        self.report(&WorkerMessage::Answer(BatchAnswer { id, execution_us: 10, result, more: false }));
    }

    /// Answers each request of a batch with four bytes.
    fn answer_well(&self, batch: &Batch) {
        self.slab.write(0, &7_u32.to_le_bytes()).unwrap();
        let parts = vec![Extent { offset: 0, len: 4 }; batch.requests.len()];
        self.answer(batch.id, Ok(vec![BatchOutput { shape: vec![1], parts }]));
    }
}

fn settings() -> PipelineSettings {
    PipelineSettings {
        tenant_weights: vec![1.0],
        step_timeout: STEP_TIMEOUT,
        name: "m".to_owned(),
        version: 1,
        live: LiveSettings {
            slo: SloTarget { latency: Duration::from_secs(1), next: None, percentile: 99.0 },
            max_delay: Duration::ZERO,
            reject_late: false,
            priority: 1,
        },
        max_requests: 4,
        memory: MEMORY_BYTES as u64,
        cache: None,
        profile: None,
        content: Arc::default(),
        residency: Arc::default(),
    }
}

struct Stage {
    pipeline: Arc<Pipeline>,
    events_rx: mpsc::Receiver<LaneEvent>,
}

impl Stage {
    fn new() -> Self {
        Self::with_profile(None)
    }

    fn with_profile(profile: Option<Profile>) -> Self {
        Self::with(|settings| settings.profile = profile)
    }

    fn with(change: impl FnOnce(&mut PipelineSettings)) -> Self {
        let (events_tx, events_rx) = mpsc::channel(EVENT_QUEUE_SIZE);
        let mut settings = settings();
        change(&mut settings);
        let pipeline = Arc::new(Pipeline::new(settings, Clock::started(UPTIME), events_tx).unwrap());
        let tensor =
            |name: &str| TensorSpec { name: name.to_owned(), datatype: Datatype::Uint32, shape: vec![-1, 1] };
        let metadata = Metadata {
            name: "m".to_owned(),
            version: "1".into(),
            platform: "emulated",
            max_batch: 8,
            streams: None,
            inputs: vec![tensor("x")],
            optional: Vec::new(),
            outputs: vec![tensor("y")],
        };
        pipeline.describe(metadata).unwrap();
        pipeline.open();
        Self { pipeline, events_rx }
    }

    /// Attaches a worker on a new lane, and routes requests to it.
    fn enter(&self, worker: u64) -> Actor {
        self.enter_with(worker, Sms(10))
    }

    fn enter_with(&self, worker: u64, sms: Sms) -> Actor {
        self.enter_as(worker, sms, |_, _| ())
    }

    fn enter_as(&self, worker: u64, sms: Sms, change: impl FnOnce(&mut LaneWorker, &BatchSocket)) -> Actor {
        let (socket, theirs) = BatchSocket::pair().unwrap();
        let slab = AnswerSlab::create("test", SLAB_BYTES).unwrap();
        let actor = Actor { socket: theirs, slab: AnswerWriter::map(slab.as_fd(), SLAB_BYTES).unwrap() };
        let metadata = self.pipeline.metadata().unwrap();
        let mut lane_worker = LaneWorker {
            worker: WorkerId(worker),
            share: Percent::WHOLE,
            slice: Slice { groups: Groups::WHOLE, sms, times: Vec::new(), max_rows: None },
            device: "emulated".into(),
            sizes: Vec::new(),
            pads: false,
            occupancy: Occupancy::new(true),
            sm_time: GpuSmTime::new(vec![Sms(132)]),
            pauses: GpuPauses::new(false),
            pieces: Ok(8),
            sleep: Ok(1 << 20),
        };
        change(&mut lane_worker, &socket);
        let reader =
            LaneReader::attach(Arc::clone(&self.pipeline), metadata, lane_worker, (Arc::new(socket), slab));
        tokio::spawn(reader.run());
        self.pipeline.route(WorkerId(worker));
        actor
    }

    fn request(&self) -> JoinHandle<Result<Vec<RequestOutput>, RequestFailure>> {
        self.request_with(Bytes::from_static(&[1, 0, 0, 0]))
    }

    fn request_with(&self, data: Bytes) -> JoinHandle<Result<Vec<RequestOutput>, RequestFailure>> {
        let pipeline = Arc::clone(&self.pipeline);
        let input = RequestInput { shape: vec![1, 1], data: data.into() };
        tokio::spawn(async move {
            pipeline
                .infer(vec![input], RequestOptions::default(), RequestArrival::now(None))
                .await
                .map(written)
        })
    }

    /// Returns the number of queued requests and the number of requests in flight.
    fn pending(&self) -> (usize, usize) {
        let report = self.pipeline.report();
        (report.queued, report.in_flight)
    }

    /// Waits until [`Self::pending`] returns `pending`.
    async fn until(&self, pending: (usize, usize)) {
        while self.pending() != pending {
            tokio::task::yield_now().await;
        }
    }

    async fn event(&mut self) -> LaneEvent {
        tokio::time::timeout(Duration::from_secs(10), self.events_rx.recv()).await.unwrap().unwrap()
    }
}

/// Starts the task that handles the pipeline's alarms.
fn watch(stage: &Stage) -> JoinHandle<()> {
    let pipeline = Arc::clone(&stage.pipeline);
    tokio::spawn(async move { pipeline.watch().await })
}

fn good() -> Vec<RequestOutput> {
    vec![RequestOutput { shape: vec![1, 1], data: Bytes::from_static(&[7, 0, 0, 0]) }]
}

#[tokio::test]
async fn invalid_answers_are_rejected_and_their_requests_are_served_by_another_worker() {
    let part = |offset, len| vec![Extent { offset, len }];
    let output = |shape: &[i64], parts| Ok(vec![BatchOutput { shape: shape.to_vec(), parts }]);
    let beyond = "lies outside its slab: 4 bytes at";
    let invalid_answers: Vec<(Result<Vec<BatchOutput>, RunFailure>, &str)> = vec![
        (Ok(vec![]), "0 outputs"),
        (output(&[1], vec![]), "0 parts"),
        (output(&[1], part(SLAB_BYTES - 2, 4)), beyond),
        (output(&[1], part(u64::MAX - 1, 4)), beyond),
        (output(&[2], part(0, 4)), "does not have 4 bytes"),
        (output(&[-1], part(0, 4)), "does not have 4 bytes"),
        (output(&[i64::MAX, i64::MAX], part(0, 4)), "does not have 4 bytes"),
    ];
    for (invalid, wrong) in invalid_answers {
        let mut stage = Stage::new();
        let faulty = stage.enter(1);
        let reply = stage.request();
        let batch = faulty.batch().await;
        faulty.answer(batch.id, invalid.clone());
        let event = stage.event().await;
        assert!(
            matches!(&event, LaneEvent::Broken(WorkerId(1), why) if why.contains(wrong)),
            "{invalid:?}: {event:?}"
        );
        let honest = stage.enter(2);
        honest.answer_well(&honest.batch().await);
        assert_eq!(reply.await.unwrap(), Ok(good()), "{invalid:?}");
    }
}

#[tokio::test]
async fn undecodable_messages_and_answers_to_unknown_batches_end_the_lane() {
    for nonsense in [true, false] {
        let mut stage = Stage::new();
        let worker = stage.enter(1);
        let reply = stage.request();
        let batch = worker.batch().await;
        let wrong = if nonsense {
            worker.send_bytes(&[0xff; 100]);
            "cannot decode a message "
        } else {
            worker.answer(batch.id + 1, Ok(vec![]));
            "which was not sent to it"
        };
        let event = stage.event().await;
        assert!(matches!(&event, LaneEvent::Broken(WorkerId(1), why) if why.contains(wrong)), "{event:?}");
        let next = stage.enter(2);
        next.answer_well(&next.batch().await);
        assert_eq!(reply.await.unwrap(), Ok(good()));
    }
}

#[tokio::test]
async fn requests_fail_at_the_third_death_and_only_alone() {
    let stage = Stage::new();
    let first = stage.enter(1);
    let alone = stage.request();
    assert_eq!(first.batch().await.requests.len(), 1);
    let other = |content| stage.request_with(Bytes::from_static(content));
    let (two, three) = (other(&[2, 0, 0, 0]), other(&[3, 0, 0, 0]));
    stage.until((1, 2)).await;
    // One request waits in the worker's socket and another waits in the queue. The death counts
    // against neither of them.
    drop(first);
    stage.until((3, 0)).await;
    let second = stage.enter(2);
    assert_eq!(second.batch().await.requests.len(), 1, "once more, before the others");
    drop(second);
    stage.until((3, 0)).await;
    let third = stage.enter(3);
    let batch = third.batch().await;
    assert_eq!(batch.requests.len(), 1, "the request with two deaths, alone");
    drop(third);
    let failed = alone.await.unwrap();
    assert!(
        matches!(failed, Err(RequestFailure::Internal(ref why)) if why.contains("3 workers died")),
        "{failed:?}"
    );
    let last = stage.enter(4);
    let mut answered = 0;
    while answered < 2 {
        let batch = last.batch().await;
        answered += batch.requests.len();
        last.answer_well(&batch);
    }
    assert_eq!((two.await.unwrap(), three.await.unwrap()), (Ok(good()), Ok(good())));
}

#[tokio::test]
async fn only_the_request_at_fault_fails_if_the_engine_refuses_a_batch() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let first = stage.request();
    let running = worker.batch().await;
    let behind = [stage.request(), stage.request(), stage.request()];
    let refused = || Err(RunFailure::Engine("index out of range".to_owned()));
    worker.answer(running.id, refused());
    assert!(
        matches!(first.await.unwrap(), Err(RequestFailure::Internal(why)) if why.contains("out of range"))
    );
    let mut served = 0;
    while served < 3 {
        let batch = worker.batch().await;
        if batch.requests.len() > 1 {
            worker.answer(batch.id, refused());
        } else {
            served += 1;
            worker.answer_well(&batch);
        }
    }
    for request in behind {
        assert_eq!(request.await.unwrap(), Ok(good()));
    }
}

#[tokio::test]
async fn a_partition_is_prepared_and_named_by_the_next_batch_only() {
    let mut stage = Stage::new();
    let worker = stage.enter(1);
    let first = stage.request();
    let batch = worker.batch().await;
    assert_eq!(batch.groups, Groups::WHOLE);
    let groups = Groups::first(3);
    stage.pipeline.command(WorkerId(1), Command::Prepare(groups));
    assert_eq!(worker.command().await, Command::Prepare(groups));
    let prepared = PartitionReply { groups, result: Ok(()) };
    worker.report(&WorkerMessage::Prepared(prepared.clone()));
    assert_eq!(stage.event().await, LaneEvent::Prepared(WorkerId(1), prepared));
    let slice = Slice { groups, sms: Sms(24), times: Vec::new(), max_rows: None };
    stage.pipeline.move_to(WorkerId(1), Percent::new(20).unwrap(), &slice);
    // The batch that was sent earlier still runs on the old SMs. Its answer does not count as the
    // first answer on the new SMs.
    let second = stage.request();
    worker.answer_well(&batch);
    assert_eq!(first.await.unwrap(), Ok(good()));
    let batch = worker.batch().await;
    assert_eq!(batch.groups, groups);
    worker.answer_well(&batch);
    assert_eq!(second.await.unwrap(), Ok(good()));
    assert!(matches!(stage.event().await, LaneEvent::FirstAnswer(WorkerId(1), _)));
    stage.pipeline.command(WorkerId(1), Command::Forget(groups));
    assert_eq!(worker.command().await, Command::Forget(groups));
    assert_eq!(stage.pipeline.stall().total, Duration::ZERO);
}

#[tokio::test]
async fn routing_moves_new_batches_and_leaves_old_ones_to_finish() {
    let mut stage = Stage::new();
    let old = stage.enter(1);
    let first = stage.request();
    let batch = old.batch().await;
    let new = stage.enter(2);
    stage.pipeline.drain(WorkerId(1));
    let second = stage.request();
    new.answer_well(&new.batch().await);
    assert_eq!(second.await.unwrap(), Ok(good()));
    assert!(matches!(stage.event().await, LaneEvent::FirstAnswer(WorkerId(2), _)));
    old.answer_well(&batch);
    assert_eq!(first.await.unwrap(), Ok(good()));
    assert!(matches!(stage.event().await, LaneEvent::FirstAnswer(WorkerId(1), _)));
    assert_eq!(stage.event().await, LaneEvent::Drained(WorkerId(1)));
}

#[tokio::test]
async fn requests_taken_back_are_served_elsewhere_and_late_answers_are_ignored() {
    let stage = Stage::new();
    let slow = stage.enter(1);
    let reply = stage.request();
    let batch = slow.batch().await;
    let quick = stage.enter(2);
    stage.pipeline.requeue(WorkerId(1));
    quick.answer_well(&quick.batch().await);
    assert_eq!(reply.await.unwrap(), Ok(good()));
    slow.answer_well(&batch);
    stage.pipeline.route(WorkerId(1));
    let again = stage.request();
    slow.answer_well(&slow.batch().await);
    assert_eq!(again.await.unwrap(), Ok(good()), "its slot is free again");
}

/// Returns a profile in which every batch takes 1 s on 60 SMs. On fewer SMs, the time is inversely
/// proportional to their number.
fn slow_profile() -> Profile {
    let row = |batch| ExecutionRow { batch, ms: vec![1000.0] };
    Profile {
        source: ProfileSource::Illustrative,
        memory: ProcessMemory::default(),
        start: StartTimes::default(),
        bandwidth: 0.1,
        shapes: Default::default(),
        execution: Execution::new(vec![Sms(60)], vec![row(1), row(8)]).unwrap(),
    }
}

#[tokio::test]
async fn each_worker_is_held_to_the_times_of_its_own_share() {
    let longest = |stage: &Stage| {
        let state = stage.pipeline.state.lock();
        let now = stage.pipeline.now();
        let time_until_hung =
            |link: &WorkerLink| link.time_until_hung(state.scheduler.lane(link.worker)?, now);
        state.links.iter().filter_map(time_until_hung).map(|left| now + left).max()
    };
    for (old_sms, new_sms) in [(60, 2), (2, 60)] {
        let mut stage = Stage::with_profile(Some(slow_profile()));
        let began = stage.pipeline.now();
        let old = stage.enter_with(1, Sms(old_sms));
        let first = stage.request();
        let batch = old.batch().await;
        let new = stage.enter_with(2, Sms(new_sms));
        let second = stage.request();
        let behind = new.batch().await;
        // The limit is 20 times the 30 s that a batch takes on two SMs. It applies to any worker
        // that has two SMs.
        assert!(longest(&stage) >= Some(began + Duration::from_secs(600)));
        old.answer_well(&batch);
        assert_eq!(first.await.unwrap(), Ok(good()));
        assert!(matches!(stage.event().await, LaneEvent::FirstAnswer(WorkerId(1), _)));
        let limit = Duration::from_secs(if new_sms == 2 { 600 } else { 20 });
        assert!(longest(&stage) >= Some(began + limit), "an answer at the old share says nothing of the new");
        new.answer_well(&behind);
        assert_eq!(second.await.unwrap(), Ok(good()));
    }
}

#[tokio::test]
async fn requests_of_a_dead_worker_are_refused_after_the_model_was_shut() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let (executing, behind) = (stage.request(), stage.request());
    stage.until((0, 2)).await;
    let waiting = [stage.request(), stage.request()];
    stage.pipeline.shut("given up");
    drop(worker);
    let reply = [executing, behind].into_iter().chain(waiting);
    for request in reply {
        let refused = tokio::time::timeout(Duration::from_secs(10), request).await.unwrap().unwrap();
        assert!(
            matches!(refused, Err(RequestFailure::Unavailable(ref why)) if why.contains("given up")),
            "{refused:?}"
        );
    }
}

#[tokio::test]
async fn a_worker_cannot_have_the_same_bytes_copied_over_and_over() {
    let mut stage = Stage::new();
    let reply = [stage.request(), stage.request(), stage.request()];
    stage.until((3, 0)).await;
    let faulty = stage.enter(1);
    let batch = faulty.batch().await;
    let parts = vec![Extent { offset: 0, len: SLAB_BYTES / 2 }; batch.requests.len()];
    faulty.answer(
        batch.id,
        Ok(vec![BatchOutput { shape: vec![i64::try_from(SLAB_BYTES / 8).unwrap()], parts }]),
    );
    assert!(matches!(stage.event().await, LaneEvent::Broken(WorkerId(1), why) if why.contains("more bytes")));
    let honest = stage.enter(2);
    for _ in &reply {
        honest.answer_well(&honest.batch().await);
    }
    for request in reply {
        assert_eq!(request.await.unwrap(), Ok(good()));
    }
}
