//! Tests streams: the requests for further answers, and the cases in which a worker, a client or a
//! stream ends.

use shadowslice_shared::batch::{StepAnswer, StreamAnswer, StreamLimits};

use super::*;
use crate::pipeline::workers::step_limit;

/// Returns a model whose workers generate two streams in turns.
fn streaming() -> Stage {
    with_streams(StreamLimits { open: 2, per_step: 1 })
}

pub(super) fn with_streams(limits: StreamLimits) -> Stage {
    let tensor =
        |name: &str| TensorSpec { name: name.to_owned(), datatype: Datatype::Uint32, shape: vec![1] };
    let (name, platform) = ("m".to_owned(), "python");
    let (inputs, outputs) = (vec![tensor("x")], vec![tensor("y")]);
    let metadata = Metadata {
        name,
        version: "1".into(),
        platform,
        max_batch: 0,
        streams: Some(limits),
        inputs,
        optional: Vec::new(),
        outputs,
    };
    let (events_tx, events_rx) = mpsc::channel(EVENT_QUEUE_SIZE);
    let pipeline = Arc::new(Pipeline::new(settings(), Clock::started(UPTIME), events_tx).unwrap());
    pipeline.describe(metadata).unwrap();
    pipeline.open();
    Stage { pipeline, events_rx }
}

pub(super) fn request(stage: &Stage) -> JoinHandle<Result<Answers, RequestFailure>> {
    let pipeline = Arc::clone(&stage.pipeline);
    let input = RequestInput { shape: vec![1], data: vec![1, 0, 0, 0].into() };
    tokio::spawn(async move {
        pipeline.infer(vec![input], RequestOptions::default(), RequestArrival::now(None)).await
    })
}

/// An answer, and the source of further answers.
type Next = (Option<Result<Vec<RequestOutput>, RequestFailure>>, Answers);

fn next(mut answers: Answers) -> JoinHandle<Next> {
    tokio::spawn(async move { (answers.next().await, answers) })
}

/// Returns the output at this offset of the response slab.
pub(super) fn number(offset: u32) -> Vec<BatchOutput> {
    vec![BatchOutput { shape: vec![1], parts: vec![Extent { offset: offset.into(), len: 4 }] }]
}

impl Actor {
    /// Sends one answer of a stream and announces further answers.
    pub(super) fn answer_with_more(&self, id: u64) {
        self.slab.write(0, &7_u32.to_le_bytes()).unwrap();
        let outputs = vec![BatchOutput { shape: vec![1], parts: vec![Extent { offset: 0, len: 4 }] }];
        self.report(&WorkerMessage::Answer(BatchAnswer {
            id,
            execution_us: 10,
            result: Ok(outputs),
            more: true,
        }));
    }

    /// Answers a step of one stream.
    pub(super) fn step_with_more(&self, id: u64) {
        self.slab.write(0, &7_u32.to_le_bytes()).unwrap();
        self.stepped(id, vec![StreamAnswer { result: Ok(number(0)), more: true }]);
    }

    pub(super) fn stepped(&self, id: u64, streams: Vec<StreamAnswer>) {
        self.report(&WorkerMessage::Stepped(StepAnswer { id, execution_us: 10, streams }));
    }

    /// Opens a stream whose first answer needs a step.
    pub(super) async fn start(&self) -> u64 {
        let id = self.batch().await.id;
        self.started(id);
        id
    }

    /// Answers the next command: opens a stream, or gives each stream of a step another answer.
    pub(super) async fn play(&self) -> Command {
        let command = self.command().await;
        match &command {
            Command::Run(batch) => self.started(batch.id),
            Command::Next(step) => {
                let answer = StreamAnswer { result: Ok(number(0)), more: true };
                self.stepped(step.id, vec![answer; step.streams.len()]);
            }
            other => panic!("{other:?} instead of a batch or step"),
        }
        command
    }

    pub(super) fn started(&self, id: u64) {
        let (result, more) = (Ok(Vec::new()), true);
        self.report(&WorkerMessage::Answer(BatchAnswer { id, execution_us: 10, result, more }));
    }

    /// Opens `count` streams, and returns their ids.
    pub(super) async fn open(&self, count: usize) -> Vec<u64> {
        let mut opened = Vec::new();
        while opened.len() < count {
            if let Command::Run(batch) = self.play().await {
                opened.push(batch.id);
            }
        }
        opened
    }

    /// Answers the next step: stream `n` of the step gets the number `from + n`. Returns the streams.
    pub(super) async fn advance(&self, from: u32) -> Vec<u64> {
        let step = self.step().await;
        let answers = (0..).zip(&step.streams).map(|(index, _)| {
            self.slab.write(u64::from(4 * index), &(from + index).to_le_bytes()).unwrap();
            StreamAnswer { result: Ok(number(4 * index)), more: true }
        });
        self.stepped(step.id, answers.collect());
        step.streams
    }

    pub(super) async fn step(&self) -> batch::StreamStep {
        match self.command().await {
            Command::Next(step) => step,
            other => panic!("{other:?} instead of a step"),
        }
    }

    pub(super) async fn closed(&self) -> u64 {
        match self.command().await {
            Command::Close(stream) => stream,
            other => panic!("{other:?} instead of a stream's end"),
        }
    }

    /// Starts a stream and sends the first answer.
    async fn begin(&self, reply: JoinHandle<Result<Answers, RequestFailure>>) -> (u64, Answers) {
        let batch = self.batch().await;
        self.answer_with_more(batch.id);
        let mut answers = reply.await.unwrap().unwrap();
        assert_eq!(
            answers.next().await,
            Some(Ok(vec![RequestOutput { shape: vec![1], ..good().remove(0) }]))
        );
        answers.delivery().mark_written();
        (batch.id, answers)
    }
}

#[tokio::test]
async fn each_answer_is_requested_and_a_lane_drains_when_its_streams_end() {
    let mut stage = streaming();
    let worker = stage.enter(1);
    let (stream, answers) = worker.begin(request(&stage)).await;
    assert_eq!(stage.pipeline.report().counts.succeeded, 1, "with the first answer");
    let reply = next(answers);
    let step = worker.step().await;
    assert_eq!(step.streams, [stream]);
    worker.step_with_more(step.id);
    let (answer, mut answers) = reply.await.unwrap();
    assert!(matches!(answer, Some(Ok(_))));
    answers.delivery().mark_written();
    assert_eq!(stage.pipeline.report().counts.succeeded, 1);

    let other = stage.enter(2);
    assert!(matches!(stage.event().await, LaneEvent::FirstAnswer(WorkerId(1), _)));
    stage.pipeline.drain(WorkerId(1));
    let (_, second) = other.begin(request(&stage)).await;
    let reply = next(answers);
    let step = worker.step().await;
    worker.stepped(step.id, vec![StreamAnswer { result: Ok(Vec::new()), more: false }]);
    assert!(reply.await.unwrap().0.is_none(), "that was the end");
    assert_eq!(worker.closed().await, stream);
    assert!(matches!(stage.event().await, LaneEvent::FirstAnswer(WorkerId(2), _)));
    assert_eq!(stage.event().await, LaneEvent::Drained(WorkerId(1)));
    let totals = stage.pipeline.totals();
    assert_eq!((totals.stream_steps.count, totals.batch_execution.count, totals.streams_failed), (2, 2, 0));
    drop(second);
    other.closed().await;
}

#[tokio::test]
async fn a_request_waits_for_a_stream_to_end_if_the_worker_is_at_its_limit() {
    let stage = streaming();
    let worker = stage.enter(1);
    let (one, first) = worker.begin(request(&stage)).await;
    let (_, second) = worker.begin(request(&stage)).await;
    let third = request(&stage);
    stage.until((1, 0)).await;
    let stepped = next(second);
    let step = worker.step().await;
    worker.step_with_more(step.id);
    let (answer, _second) = stepped.await.unwrap();
    assert!(matches!(answer, Some(Ok(_))), "open streams go on meanwhile");
    drop(first);
    assert_eq!(worker.closed().await, one);
    worker.begin(third).await;
}

#[tokio::test]
async fn a_stream_is_closed_whenever_its_client_disconnects() {
    let stage = streaming();
    let worker = stage.enter(1);
    // The client disconnects before the first answer.
    let reply = request(&stage);
    let batch = worker.batch().await;
    reply.abort();
    assert!(reply.await.is_err());
    worker.answer_with_more(batch.id);
    assert_eq!(worker.closed().await, batch.id);
    // The client disconnects between two answers.
    let (stream, answers) = worker.begin(request(&stage)).await;
    drop(answers);
    assert_eq!(worker.closed().await, stream);
    // The client disconnects while a step is in flight.
    let (stream, answers) = worker.begin(request(&stage)).await;
    let reply = next(answers);
    let step = worker.step().await;
    reply.abort();
    assert_eq!(worker.closed().await, stream);
    worker.step_with_more(step.id);
    // The three streams whose clients disconnected no longer count against the worker's limit.
    let (_, first) = worker.begin(request(&stage)).await;
    worker.begin(request(&stage)).await;
    drop(first);
    assert_eq!(stage.pipeline.report().counts.cancelled, 1);
}

#[tokio::test]
async fn a_worker_ends_with_its_streams_and_requests_without_an_answer_are_retried() {
    let stage = streaming();
    let worker = stage.enter(1);
    let (_, answers) = worker.begin(request(&stage)).await;
    let (_, idle) = worker.begin(request(&stage)).await;
    let executing = next(answers);
    worker.step().await;
    drop(worker);
    let (answer, mut answers) = executing.await.unwrap();
    let Some(Err(RequestFailure::Unavailable(why))) = answer else { panic!("{answer:?}") };
    assert!(why.contains("died while computing"), "{why}");
    assert!(answers.next().await.is_none());
    let (answer, _) = next(idle).await.unwrap();
    let Some(Err(RequestFailure::Unavailable(why))) = answer else { panic!("{answer:?}") };
    assert!(why.contains("send the request again"), "{why}");
    assert_eq!(stage.pipeline.totals().streams_failed, 2);

    let again = stage.enter(2);
    let reply = request(&stage);
    again.batch().await;
    drop(again);
    let third = stage.enter(3);
    third.begin(reply).await;
}

#[tokio::test]
async fn inputs_in_whose_streams_workers_die_are_refused_from_the_third_death_on() {
    let mut stage = streaming();
    for number in 1..=3 {
        let worker = stage.enter(number);
        let (_, answers) = worker.begin(request(&stage)).await;
        let reply = next(answers);
        worker.step().await;
        drop(worker);
        assert!(matches!(reply.await.unwrap().0, Some(Err(RequestFailure::Unavailable(_)))));
    }
    while stage.event().await != LaneEvent::PoisonConfirmed {}
    stage.enter(4);
    let refused = request(&stage).await.unwrap().unwrap_err();
    assert!(
        matches!(&refused, RequestFailure::Internal(why) if why.contains("the server refuses them")),
        "{refused:?}"
    );
}

#[tokio::test]
async fn streams_end_if_draining_takes_too_long() {
    let stage = streaming();
    let worker = stage.enter(1);
    let (_, answers) = worker.begin(request(&stage)).await;
    stage.enter(2);
    stage.pipeline.drain(WorkerId(1));
    stage.pipeline.requeue(WorkerId(1));
    let (answer, _) = next(answers).await.unwrap();
    assert!(matches!(answer, Some(Err(RequestFailure::Unavailable(_)))), "{answer:?}");
}

#[tokio::test]
async fn a_failure_in_the_middle_ends_the_stream_with_its_reason() {
    let stage = streaming();
    let worker = stage.enter(1);
    let (stream, answers) = worker.begin(request(&stage)).await;
    let reply = next(answers);
    let step = worker.step().await;
    let result = Err(RunFailure::Engine("broken".to_owned()));
    worker.stepped(step.id, vec![StreamAnswer { result, more: false }]);
    let (answer, _) = reply.await.unwrap();
    assert!(
        matches!(answer, Some(Err(RequestFailure::Internal(ref why))) if why.contains("broken")),
        "{answer:?}"
    );
    assert_eq!(worker.closed().await, stream);
}

#[tokio::test]
async fn a_model_that_gives_one_answer_cannot_send_more() {
    let mut stage = Stage::new();
    let faulty = stage.enter(1);
    let reply = stage.request();
    faulty.answer_with_more(faulty.batch().await.id);
    let event = stage.event().await;
    assert!(matches!(&event, LaneEvent::Broken(_, why) if why.contains("further answers")), "{event:?}");
    let honest = stage.enter(2);
    honest.answer_well(&honest.batch().await);
    assert_eq!(reply.await.unwrap(), Ok(good()));
}

#[tokio::test]
async fn a_step_has_a_fixed_limit_on_a_crowded_gpu() {
    let stage = streaming();
    let occupancy = Occupancy::new(true);
    let _others: Vec<_> = (0..8).map(|_| occupancy.occupy(Percent::WHOLE)).collect();
    let worker = stage.enter_as(1, Sms(10), |lane_worker, _| lane_worker.occupancy = occupancy);
    let (_, answers) = worker.begin(request(&stage)).await;
    let _asked = next(answers);
    let _unanswered = worker.step().await;
    let state = stage.pipeline.state.lock();
    let (link, lane) = (&state.links[0], state.scheduler.lane(WorkerId(1)).unwrap());
    let since = lane.in_flight().next().unwrap().executing_since.unwrap();
    assert_eq!(link.time_until_hung(lane, since), Some(step_limit(STEP_TIMEOUT)));
}
