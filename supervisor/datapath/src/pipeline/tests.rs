//! A pipeline with workers played by the test: honest workers, lying workers and dying workers.

mod blocked;
mod bounds;
mod counted;
mod delivery;
mod doors;
mod hangs;
mod journal;
mod streams;
mod terms;

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

/// For how long the supervisor has run.
const UPTIME: Duration = Duration::from_secs(30);

const SLAB_BYTES: u64 = 4096;
const MEMORY_BYTES: usize = 1 << 16;

/// The worker's side of a lane.
struct Actor {
    socket: OwnedFd,
    slab: AnswerWriter,
}

impl Actor {
    /// The next command. Blocks, so on a thread that may.
    async fn command(&self) -> Command {
        let socket = self.socket.try_clone().unwrap();
        let received = tokio::task::spawn_blocking(move || {
            let mut message = vec![0; MAX_MESSAGE_BYTES];
            let length = recv(socket.as_raw_fd(), &mut message, MsgFlags::empty()).unwrap();
            batch::decode::<Command>(&message[..length]).unwrap()
        });
        tokio::time::timeout(Duration::from_secs(10), received).await.unwrap().unwrap()
    }

    /// The next command, which is a batch.
    async fn batch(&self) -> Batch {
        match self.command().await {
            Command::Run(batch) => batch,
            other => panic!("{other:?} instead of a batch"),
        }
    }

    fn say(&self, bytes: &[u8]) {
        send(self.socket.as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL).unwrap();
    }

    fn report(&self, report: &WorkerMessage) {
        let mut message = vec![0; MAX_MESSAGE_BYTES];
        self.say(batch::encode(report, &mut message).unwrap());
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

fn settings() -> Settings {
    Settings {
        name: "m".to_owned(),
        live: LiveSettings {
            slo: SloTarget { latency: Duration::from_secs(1), percentile: 99.0 },
            max_delay: Duration::ZERO,
            reject_late: false,
        },
        max_requests: 4,
        memory: MEMORY_BYTES as u64,
        profile: None,
        content: Arc::default(),
    }
}

struct Stage {
    pipeline: Arc<Pipeline>,
    facts: mpsc::Receiver<LaneFact>,
}

impl Stage {
    fn new() -> Self {
        Self::with_profile(None)
    }

    fn with_profile(profile: Option<Profile>) -> Self {
        Self::with(|settings| settings.profile = profile)
    }

    fn with(change: impl FnOnce(&mut Settings)) -> Self {
        let (reporter, facts) = mpsc::channel(FACTS);
        let mut settings = settings();
        change(&mut settings);
        let pipeline = Arc::new(Pipeline::new(settings, Clock::started(UPTIME), reporter).unwrap());
        let tensor =
            |name: &str| TensorSpec { name: name.to_owned(), datatype: Datatype::Uint32, shape: vec![-1, 1] };
        let metadata = Metadata {
            name: "m".to_owned(),
            platform: "emulated",
            max_batch: 8,
            streams: None,
            inputs: vec![tensor("x")],
            optional: Vec::new(),
            outputs: vec![tensor("y")],
        };
        pipeline.describe(metadata).unwrap();
        pipeline.open();
        Self { pipeline, facts }
    }

    /// A worker on a lane of its own, routed to.
    fn enter(&self, worker: u64) -> Actor {
        self.enter_with(worker, Sms(10))
    }

    fn enter_with(&self, worker: u64, sms: Sms) -> Actor {
        self.enter_as(worker, sms, |_, _| ())
    }

    fn enter_as(&self, worker: u64, sms: Sms, change: impl FnOnce(&mut Arrival, &BatchSocket)) -> Actor {
        let (socket, theirs) = BatchSocket::pair().unwrap();
        let slab = AnswerSlab::create("test", SLAB_BYTES).unwrap();
        let actor = Actor { socket: theirs, slab: AnswerWriter::map(slab.as_fd(), SLAB_BYTES).unwrap() };
        let metadata = self.pipeline.metadata().unwrap();
        let mut arrival = Arrival {
            worker: WorkerId(worker),
            share: Percent::WHOLE,
            slice: Slice { groups: Groups::WHOLE, sms, times: Vec::new(), max_rows: None },
            device: "emulated".into(),
            sizes: Vec::new(),
            pads: false,
            occupancy: Occupancy::new(true),
        };
        change(&mut arrival, &socket);
        let reader =
            LaneReader::attach(Arc::clone(&self.pipeline), metadata, arrival, (Arc::new(socket), slab));
        tokio::spawn(reader.run());
        self.pipeline.route(Some(WorkerId(worker)));
        actor
    }

    fn ask(&self) -> JoinHandle<Result<Vec<Output>, Failure>> {
        self.ask_with(Bytes::from_static(&[1, 0, 0, 0]))
    }

    fn ask_with(&self, data: Bytes) -> JoinHandle<Result<Vec<Output>, Failure>> {
        let pipeline = Arc::clone(&self.pipeline);
        let input = Input { shape: vec![1, 1], data: data.into() };
        tokio::spawn(async move {
            pipeline.infer(vec![input], RequestOptions::default(), Coming::now(None)).await.map(written)
        })
    }

    /// Waits until so many requests wait and so many are in flight.
    async fn until(&self, pending: (usize, usize)) {
        while self.pipeline.report().pending != pending {
            tokio::task::yield_now().await;
        }
    }

    async fn fact(&mut self) -> LaneFact {
        tokio::time::timeout(Duration::from_secs(10), self.facts.recv()).await.unwrap().unwrap()
    }
}

/// Has its alarms heard.
fn watch(stage: &Stage) -> JoinHandle<()> {
    let pipeline = Arc::clone(&stage.pipeline);
    tokio::spawn(async move { pipeline.watch().await })
}

fn good() -> Vec<Output> {
    vec![Output { shape: vec![1, 1], data: Bytes::from_static(&[7, 0, 0, 0]) }]
}

#[tokio::test]
async fn what_a_liar_says_is_not_believed_and_its_requests_are_served_by_another() {
    let part = |offset, len| vec![Extent { offset, len }];
    let output = |shape: &[i64], parts| Ok(vec![BatchOutput { shape: shape.to_vec(), parts }]);
    let beyond = "lies outside of its slab: 4 bytes at";
    let lies: Vec<(Result<Vec<BatchOutput>, RunFailure>, &str)> = vec![
        (Ok(vec![]), "0 outputs"),
        (output(&[1], vec![]), "0 parts"),
        (output(&[1], part(SLAB_BYTES - 2, 4)), beyond),
        (output(&[1], part(u64::MAX - 1, 4)), beyond),
        (output(&[2], part(0, 4)), "does not have 4 bytes"),
        (output(&[-1], part(0, 4)), "does not have 4 bytes"),
        (output(&[i64::MAX, i64::MAX], part(0, 4)), "does not have 4 bytes"),
    ];
    for (lie, wrong) in lies {
        let mut stage = Stage::new();
        let liar = stage.enter(1);
        let asked = stage.ask();
        let batch = liar.batch().await;
        liar.answer(batch.id, lie.clone());
        let fact = stage.fact().await;
        assert!(
            matches!(&fact, LaneFact::Broken(WorkerId(1), why) if why.contains(wrong)),
            "{lie:?}: {fact:?}"
        );
        let honest = stage.enter(2);
        honest.answer_well(&honest.batch().await);
        assert_eq!(asked.await.unwrap(), Ok(good()), "{lie:?}");
    }
}

#[tokio::test]
async fn nonsense_and_answers_to_nothing_end_the_lane() {
    for nonsense in [true, false] {
        let mut stage = Stage::new();
        let worker = stage.enter(1);
        let asked = stage.ask();
        let batch = worker.batch().await;
        let wrong = if nonsense {
            worker.say(&[0xff; 100]);
            "cannot decode a message: "
        } else {
            worker.answer(batch.id + 1, Ok(vec![]));
            "which it does not have"
        };
        let fact = stage.fact().await;
        assert!(matches!(&fact, LaneFact::Broken(WorkerId(1), why) if why.contains(wrong)), "{fact:?}");
        let next = stage.enter(2);
        next.answer_well(&next.batch().await);
        assert_eq!(asked.await.unwrap(), Ok(good()));
    }
}

#[tokio::test]
async fn requests_fail_at_the_third_death_and_only_alone() {
    let stage = Stage::new();
    let first = stage.enter(1);
    let alone = stage.ask();
    assert_eq!(first.batch().await.requests.len(), 1);
    let other = |content| stage.ask_with(Bytes::from_static(content));
    let (two, three) = (other(&[2, 0, 0, 0]), other(&[3, 0, 0, 0]));
    stage.until((1, 2)).await;
    // One request stands behind in the worker's socket, another waits: neither is blamed.
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
        matches!(failed, Err(Failure::Internal(ref why)) if why.contains("3 workers died")),
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
async fn of_a_batch_that_the_engine_refuses_only_the_guilty_request_fails() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let first = stage.ask();
    let running = worker.batch().await;
    let behind = [stage.ask(), stage.ask(), stage.ask()];
    let refused = || Err(RunFailure::Engine("index out of range".to_owned()));
    worker.answer(running.id, refused());
    assert!(matches!(first.await.unwrap(), Err(Failure::Internal(why)) if why.contains("out of range")));
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
    let first = stage.ask();
    let batch = worker.batch().await;
    assert_eq!(batch.groups, Groups::WHOLE);
    let groups = Groups::first(3);
    stage.pipeline.command(WorkerId(1), Command::Prepare(groups));
    assert_eq!(worker.command().await, Command::Prepare(groups));
    let prepared = PartitionReply { groups, result: Ok(()) };
    worker.report(&WorkerMessage::Prepared(prepared.clone()));
    assert_eq!(stage.fact().await, LaneFact::Prepared(WorkerId(1), prepared));
    let slice = Slice { groups, sms: Sms(24), times: Vec::new(), max_rows: None };
    stage.pipeline.move_to(WorkerId(1), Percent::new(20).unwrap(), &slice);
    // The batch that was sent before runs on the SMs that it was sent for, and is no first answer
    // on the new SMs.
    let second = stage.ask();
    worker.answer_well(&batch);
    assert_eq!(first.await.unwrap(), Ok(good()));
    let batch = worker.batch().await;
    assert_eq!(batch.groups, groups);
    worker.answer_well(&batch);
    assert_eq!(second.await.unwrap(), Ok(good()));
    assert!(matches!(stage.fact().await, LaneFact::FirstAnswer(WorkerId(1), _)));
    stage.pipeline.command(WorkerId(1), Command::Forget(groups));
    assert_eq!(worker.command().await, Command::Forget(groups));
    assert_eq!(stage.pipeline.stall().total, Duration::ZERO);
}

#[tokio::test]
async fn routing_moves_new_batches_and_leaves_old_ones_to_finish() {
    let mut stage = Stage::new();
    let old = stage.enter(1);
    let first = stage.ask();
    let batch = old.batch().await;
    let new = stage.enter(2);
    stage.pipeline.drain(WorkerId(1));
    let second = stage.ask();
    new.answer_well(&new.batch().await);
    assert_eq!(second.await.unwrap(), Ok(good()));
    assert!(matches!(stage.fact().await, LaneFact::FirstAnswer(WorkerId(2), _)));
    old.answer_well(&batch);
    assert_eq!(first.await.unwrap(), Ok(good()));
    assert!(matches!(stage.fact().await, LaneFact::FirstAnswer(WorkerId(1), _)));
    assert_eq!(stage.fact().await, LaneFact::Drained(WorkerId(1)));
}

#[tokio::test]
async fn what_is_taken_back_is_served_elsewhere_and_late_answers_are_ignored() {
    let stage = Stage::new();
    let slow = stage.enter(1);
    let asked = stage.ask();
    let batch = slow.batch().await;
    let quick = stage.enter(2);
    stage.pipeline.requeue(WorkerId(1));
    quick.answer_well(&quick.batch().await);
    assert_eq!(asked.await.unwrap(), Ok(good()));
    slow.answer_well(&batch);
    stage.pipeline.route(Some(WorkerId(1)));
    let again = stage.ask();
    slow.answer_well(&slow.batch().await);
    assert_eq!(again.await.unwrap(), Ok(good()), "its slot has come back");
}

/// A second for any batch on 60 SMs, in inverse proportion on fewer.
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
        let hangs_in = |link: &link::Link| link.hangs_in(state.scheduler.lane(link.worker)?, now);
        state.links.iter().filter_map(hangs_in).map(|left| now + left).max()
    };
    for (old_sms, new_sms) in [(60, 2), (2, 60)] {
        let mut stage = Stage::with_profile(Some(slow_profile()));
        let began = stage.pipeline.now();
        let old = stage.enter_with(1, Sms(old_sms));
        let first = stage.ask();
        let batch = old.batch().await;
        let new = stage.enter_with(2, Sms(new_sms));
        let second = stage.ask();
        let behind = new.batch().await;
        // Twenty times the thirty seconds that a batch takes on two SMs, whichever worker has them.
        assert!(longest(&stage) >= Some(began + Duration::from_secs(600)));
        old.answer_well(&batch);
        assert_eq!(first.await.unwrap(), Ok(good()));
        assert!(matches!(stage.fact().await, LaneFact::FirstAnswer(WorkerId(1), _)));
        let limit = Duration::from_secs(if new_sms == 2 { 600 } else { 20 });
        assert!(longest(&stage) >= Some(began + limit), "an answer at the old share says nothing of the new");
        new.answer_well(&behind);
        assert_eq!(second.await.unwrap(), Ok(good()));
    }
}

#[tokio::test]
async fn whether_a_worker_went_with_nothing_to_do_is_known_when_it_has_gone() {
    let mut stage = Stage::new();
    let (idle, busy) = (stage.enter(1), stage.enter(2));
    let request = stage.ask();
    let _unanswered = busy.batch().await;
    let known = |stage: &Stage| [1, 2].map(|worker| stage.pipeline.is_idle(WorkerId(worker)));
    assert_eq!(known(&stage), [true, false]);
    stage.pipeline.requeue(WorkerId(2));
    assert_eq!(known(&stage), [true, false], "it executes still");
    drop(idle);
    assert_eq!(stage.fact().await, LaneFact::Gone(WorkerId(1)));
    assert_eq!(known(&stage), [true, false]);
    drop(busy);
    assert_eq!(stage.fact().await, LaneFact::Gone(WorkerId(2)));
    assert_eq!(known(&stage), [true, false]);
    request.abort();
}

#[tokio::test]
async fn of_several_workers_that_went_together_it_is_known_of_each() {
    let mut stage = Stage::new();
    for worker in [1, 2] {
        drop(stage.enter(worker));
        assert_eq!(stage.fact().await, LaneFact::Gone(WorkerId(worker)));
    }
    let known = |stage: &Stage, workers: [u64; 3]| workers.map(|id| stage.pipeline.is_idle(WorkerId(id)));
    assert_eq!(known(&stage, [1, 2, 3]), [true, true, false]);
    for worker in 3..=9 {
        drop(stage.enter(worker));
        assert_eq!(stage.fact().await, LaneFact::Gone(WorkerId(worker)));
    }
    assert_eq!(known(&stage, [1, 2, 9]), [false, true, true], "of the last eight");
}

#[tokio::test]
async fn what_comes_back_from_a_dead_worker_after_the_door_was_shut_is_refused() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let (executing, behind) = (stage.ask(), stage.ask());
    stage.until((0, 2)).await;
    let waiting = [stage.ask(), stage.ask()];
    stage.pipeline.shut("given up");
    drop(worker);
    let asked = [executing, behind].into_iter().chain(waiting);
    for request in asked {
        let refused = tokio::time::timeout(Duration::from_secs(10), request).await.unwrap().unwrap();
        assert!(
            matches!(refused, Err(Failure::Unavailable(ref why)) if why.contains("given up")),
            "{refused:?}"
        );
    }
}

#[tokio::test]
async fn a_worker_cannot_have_the_same_bytes_copied_over_and_over() {
    let mut stage = Stage::new();
    let asked = [stage.ask(), stage.ask(), stage.ask()];
    stage.until((3, 0)).await;
    let liar = stage.enter(1);
    let batch = liar.batch().await;
    let parts = vec![Extent { offset: 0, len: SLAB_BYTES / 2 }; batch.requests.len()];
    liar.answer(
        batch.id,
        Ok(vec![BatchOutput { shape: vec![i64::try_from(SLAB_BYTES / 8).unwrap()], parts }]),
    );
    assert!(matches!(stage.fact().await, LaneFact::Broken(WorkerId(1), why) if why.contains("more bytes")));
    let honest = stage.enter(2);
    for _ in &asked {
        honest.answer_well(&honest.batch().await);
    }
    for request in asked {
        assert_eq!(request.await.unwrap(), Ok(good()));
    }
}
