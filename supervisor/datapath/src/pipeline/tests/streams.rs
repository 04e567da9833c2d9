//! Streams: how their answers are asked for, and what becomes of them when something ends.

use shadowslice_policy::latency::BLIND_HANG_LIMIT;

use super::*;

/// A model whose workers generate two streams at a time.
fn streaming() -> Stage {
    let tensor =
        |name: &str| TensorSpec { name: name.to_owned(), datatype: Datatype::Uint32, shape: vec![1] };
    let (name, platform) = ("m".to_owned(), "python");
    let (inputs, outputs) = (vec![tensor("x")], vec![tensor("y")]);
    let metadata =
        Metadata { name, platform, max_batch: 0, streams: Some(2), inputs, optional: Vec::new(), outputs };
    let (reporter, facts) = mpsc::channel(FACTS);
    let pipeline = Arc::new(Pipeline::new(settings(), Clock::started(UPTIME), reporter).unwrap());
    pipeline.describe(metadata).unwrap();
    pipeline.open();
    Stage { pipeline, facts }
}

fn ask(stage: &Stage) -> JoinHandle<Result<Answers, Failure>> {
    let pipeline = Arc::clone(&stage.pipeline);
    let input = Input { shape: vec![1], data: vec![1, 0, 0, 0].into() };
    tokio::spawn(
        async move { pipeline.stream(vec![input], RequestOptions::default(), Coming::now(None)).await },
    )
}

/// An answer, and where further ones come from.
type Next = (Option<Result<Vec<Output>, Failure>>, Answers);

fn next(mut answers: Answers) -> JoinHandle<Next> {
    tokio::spawn(async move { (answers.next().await, answers) })
}

impl Actor {
    /// One answer of a stream, after which there is more.
    fn goes_on(&self, id: u64) {
        self.slab.write(0, &7_u32.to_le_bytes()).unwrap();
        let outputs = vec![BatchOutput { shape: vec![1], parts: vec![Extent { offset: 0, len: 4 }] }];
        self.report(&WorkerMessage::Answer(BatchAnswer {
            id,
            execution_us: 10,
            result: Ok(outputs),
            more: true,
        }));
    }

    async fn step(&self) -> batch::StreamStep {
        match self.command().await {
            Command::Next(step) => step,
            other => panic!("{other:?} instead of a step"),
        }
    }

    async fn closed(&self) -> u64 {
        match self.command().await {
            Command::Close(stream) => stream,
            other => panic!("{other:?} instead of a stream's end"),
        }
    }

    /// Begins a stream and gives its first answer.
    async fn begins(&self, asked: JoinHandle<Result<Answers, Failure>>) -> (u64, Answers) {
        let batch = self.batch().await;
        self.goes_on(batch.id);
        let mut answers = asked.await.unwrap().unwrap();
        assert_eq!(answers.next().await, Some(Ok(vec![Output { shape: vec![1], ..good().remove(0) }])));
        answers.delivery().written();
        (batch.id, answers)
    }
}

#[tokio::test]
async fn each_answer_is_asked_for_and_a_lane_drains_when_its_streams_end() {
    let mut stage = streaming();
    let worker = stage.enter(1);
    let (stream, answers) = worker.begins(ask(&stage)).await;
    assert_eq!(stage.pipeline.report().counts.succeeded, 1, "with the first answer");
    let asked = next(answers);
    let step = worker.step().await;
    assert_eq!(step.stream, stream);
    worker.goes_on(step.id);
    let (answer, mut answers) = asked.await.unwrap();
    assert!(matches!(answer, Some(Ok(_))));
    answers.delivery().written();
    assert_eq!(stage.pipeline.report().counts.succeeded, 1);

    let other = stage.enter(2);
    assert!(matches!(stage.fact().await, LaneFact::FirstAnswer(WorkerId(1), _)));
    stage.pipeline.drain(WorkerId(1));
    let (_, second) = other.begins(ask(&stage)).await;
    let asked = next(answers);
    let step = worker.step().await;
    worker.answer(step.id, Ok(vec![]));
    assert!(asked.await.unwrap().0.is_none(), "that was the end");
    assert_eq!(worker.closed().await, stream);
    assert!(matches!(stage.fact().await, LaneFact::FirstAnswer(WorkerId(2), _)));
    assert_eq!(stage.fact().await, LaneFact::Drained(WorkerId(1)));
    let totals = stage.pipeline.totals();
    assert_eq!((totals.stream_steps.count, totals.batch_execution.count, totals.streams_failed), (2, 2, 0));
    drop(second);
    other.closed().await;
}

#[tokio::test]
async fn a_worker_has_so_many_streams_and_the_next_request_waits_for_the_end_of_one() {
    let stage = streaming();
    let worker = stage.enter(1);
    let (one, first) = worker.begins(ask(&stage)).await;
    let (_, second) = worker.begins(ask(&stage)).await;
    let third = ask(&stage);
    stage.until((1, 0)).await;
    let stepped = next(second);
    let step = worker.step().await;
    worker.goes_on(step.id);
    let (answer, _second) = stepped.await.unwrap();
    assert!(matches!(answer, Some(Ok(_))), "open streams go on meanwhile");
    drop(first);
    assert_eq!(worker.closed().await, one);
    worker.begins(third).await;
}

#[tokio::test]
async fn a_stream_whose_client_has_gone_is_closed_whenever_that_was() {
    let stage = streaming();
    let worker = stage.enter(1);
    // Before the first answer.
    let asked = ask(&stage);
    let batch = worker.batch().await;
    asked.abort();
    assert!(asked.await.is_err());
    worker.goes_on(batch.id);
    assert_eq!(worker.closed().await, batch.id);
    // Between two answers.
    let (stream, answers) = worker.begins(ask(&stage)).await;
    drop(answers);
    assert_eq!(worker.closed().await, stream);
    // While the next one is on its way.
    let (stream, answers) = worker.begins(ask(&stage)).await;
    let asked = next(answers);
    let step = worker.step().await;
    asked.abort();
    assert_eq!(worker.closed().await, stream);
    worker.goes_on(step.id);
    // None of them counts against the worker's streams.
    let (_, first) = worker.begins(ask(&stage)).await;
    worker.begins(ask(&stage)).await;
    drop(first);
    assert_eq!(stage.pipeline.report().counts.cancelled, 1);
}

#[tokio::test]
async fn the_end_of_a_worker_is_that_of_its_streams_but_not_of_requests_without_an_answer() {
    let stage = streaming();
    let worker = stage.enter(1);
    let (_, answers) = worker.begins(ask(&stage)).await;
    let (_, idle) = worker.begins(ask(&stage)).await;
    let executing = next(answers);
    worker.step().await;
    drop(worker);
    let (answer, mut answers) = executing.await.unwrap();
    let Some(Err(Failure::Unavailable(why))) = answer else { panic!("{answer:?}") };
    assert!(why.contains("died while it computed"), "{why}");
    assert!(answers.next().await.is_none());
    let (answer, _) = next(idle).await.unwrap();
    let Some(Err(Failure::Unavailable(why))) = answer else { panic!("{answer:?}") };
    assert!(why.contains("send the request again"), "{why}");
    assert_eq!(stage.pipeline.totals().streams_failed, 2);

    let again = stage.enter(2);
    let asked = ask(&stage);
    again.batch().await;
    drop(again);
    let third = stage.enter(3);
    third.begins(asked).await;
}

#[tokio::test]
async fn inputs_in_whose_streams_workers_die_are_refused_from_the_third_death_on() {
    let mut stage = streaming();
    for number in 1..=3 {
        let worker = stage.enter(number);
        let (_, answers) = worker.begins(ask(&stage)).await;
        let asked = next(answers);
        worker.step().await;
        drop(worker);
        assert!(matches!(asked.await.unwrap().0, Some(Err(Failure::Unavailable(_)))));
    }
    while stage.fact().await != LaneFact::PoisonConfirmed {}
    stage.enter(4);
    let refused = ask(&stage).await.unwrap().unwrap_err();
    assert!(matches!(&refused, Failure::Internal(why) if why.contains("they are refused")), "{refused:?}");
}

#[tokio::test]
async fn streams_end_where_draining_takes_too_long() {
    let stage = streaming();
    let worker = stage.enter(1);
    let (_, answers) = worker.begins(ask(&stage)).await;
    stage.enter(2);
    stage.pipeline.drain(WorkerId(1));
    stage.pipeline.requeue(WorkerId(1));
    let (answer, _) = next(answers).await.unwrap();
    assert!(matches!(answer, Some(Err(Failure::Unavailable(_)))), "{answer:?}");
}

#[tokio::test]
async fn a_failure_in_the_middle_ends_the_stream_with_its_reason() {
    let stage = streaming();
    let worker = stage.enter(1);
    let (stream, answers) = worker.begins(ask(&stage)).await;
    let asked = next(answers);
    let step = worker.step().await;
    worker.answer(step.id, Err(RunFailure::Engine("broken".to_owned())));
    let (answer, _) = asked.await.unwrap();
    assert!(matches!(answer, Some(Err(Failure::Internal(ref why))) if why.contains("broken")), "{answer:?}");
    assert_eq!(worker.closed().await, stream);
}

#[tokio::test]
async fn a_model_that_gives_one_answer_cannot_have_more() {
    let mut stage = Stage::new();
    let liar = stage.enter(1);
    let asked = stage.ask();
    liar.goes_on(liar.batch().await.id);
    let fact = stage.fact().await;
    assert!(matches!(&fact, LaneFact::Broken(_, why) if why.contains("there is more of it")), "{fact:?}");
    let honest = stage.enter(2);
    honest.answer_well(&honest.batch().await);
    assert_eq!(asked.await.unwrap(), Ok(good()));
}

#[tokio::test]
async fn a_step_has_its_limit_however_crowded_the_gpu_is() {
    let stage = streaming();
    let occupancy = Occupancy::new(true);
    let _others: Vec<_> = (0..8).map(|_| occupancy.occupy(Percent::WHOLE)).collect();
    let worker = stage.enter_as(1, Sms(10), |arrival, _| arrival.occupancy = occupancy);
    let (_, answers) = worker.begins(ask(&stage)).await;
    let _asked = next(answers);
    let _unanswered = worker.step().await;
    let state = stage.pipeline.state.lock();
    let (link, lane) = (&state.links[0], state.scheduler.lane(WorkerId(1)).unwrap());
    let since = lane.in_flight().next().unwrap().executing_since.unwrap();
    assert_eq!(link.hangs_in(lane, since), Some(BLIND_HANG_LIMIT));
}
