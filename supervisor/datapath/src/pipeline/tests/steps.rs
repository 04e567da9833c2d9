//! Tests streams that advance together.

use shadowslice_shared::batch::{StreamAnswer, StreamLimits};

use super::streams::{number, request, with_streams};
use super::*;

/// Returns a model whose workers advance up to three streams together.
fn stepping() -> Stage {
    with_streams(StreamLimits { open: 3, per_step: 3 })
}

/// Returns the number in the next answer.
async fn next_number(answers: &mut Answers) -> u32 {
    let answer = answers.next().await.unwrap().unwrap();
    answers.delivery().mark_written();
    u32::from_le_bytes(answer[0].data[..].try_into().unwrap())
}

#[tokio::test]
async fn streams_advance_together_and_a_new_one_joins_between_two_steps() {
    let stage = stepping();
    let worker = stage.enter(1);
    let one = request(&stage);
    let first = worker.start().await;
    assert_eq!(worker.advance(10).await, [first]);
    let mut one = one.await.unwrap().unwrap();
    // The worker computes the second answer before the client takes the first one.
    let step = worker.step().await;
    let two = request(&stage);
    let second = worker.start().await;
    worker.slab.write(0, &11_u32.to_le_bytes()).unwrap();
    worker.stepped(step.id, vec![StreamAnswer { result: Ok(number(0)), more: true }]);
    assert_eq!(next_number(&mut one).await, 10);
    let mut streams = worker.advance(12).await;
    if streams.len() == 1 {
        // The start ended after the step, so the second stream joins the next step.
        streams = worker.advance(13).await;
    }
    streams.sort_unstable();
    assert_eq!(streams, [first, second]);
    let mut two = two.await.unwrap().unwrap();
    next_number(&mut two).await;
    assert_eq!(stage.pipeline.report().counts.succeeded, 2, "with their first answers");
}

#[tokio::test]
async fn a_step_advances_only_streams_whose_clients_have_room() {
    let stage = stepping();
    let worker = stage.enter(1);
    let slow = request(&stage);
    let first = worker.start().await;
    assert_eq!(worker.advance(0).await, [first]);
    let mut slow = slow.await.unwrap().unwrap();
    // The first answer is in the reply, and two answers wait for the client.
    assert_eq!((worker.advance(1).await, worker.advance(2).await), (vec![first], vec![first]));
    let quick = request(&stage);
    let second = worker.start().await;
    assert_eq!(worker.advance(20).await, [second]);
    let mut quick = quick.await.unwrap().unwrap();
    assert_eq!(worker.advance(21).await, [second]);
    assert_eq!(next_number(&mut quick).await, 20);
    for expected in 0..3 {
        assert_eq!(next_number(&mut slow).await, expected);
    }
    assert_eq!(next_number(&mut quick).await, 21);
}

/// Reads answers until the stream ends or fails, or `most` answers have arrived.
fn read(reply: JoinHandle<Result<Answers, RequestFailure>>, most: usize) -> JoinHandle<Vec<NextAnswer>> {
    tokio::spawn(async move {
        let (mut answers, mut seen) = (reply.await.unwrap().unwrap(), Vec::new());
        while seen.len() < most
            && let Some(answer) = answers.next().await
        {
            seen.push(answer);
        }
        seen
    })
}

type NextAnswer = Result<Vec<RequestOutput>, RequestFailure>;

#[tokio::test]
async fn one_stream_of_a_step_fails_or_ends_alone() {
    let stage = stepping();
    let worker = stage.enter(1);
    let mut replies = Vec::new();
    let mut opened = Vec::new();
    for _ in 0..3 {
        replies.push(read(request(&stage), 50));
        opened.extend(worker.open(1).await);
    }
    let all = loop {
        let step = worker.step().await;
        let result = |&stream: &u64| match stream {
            _ if step.streams.len() < 3 => StreamAnswer { result: Ok(number(0)), more: true },
            stream if stream == opened[0] => {
                StreamAnswer { result: Err(RunFailure::Engine("broken".to_owned())), more: false }
            }
            stream => StreamAnswer { result: Ok(number(0)), more: stream == opened[2] },
        };
        worker.stepped(step.id, step.streams.iter().map(result).collect());
        if step.streams.len() == 3 {
            break step.streams;
        }
    };
    assert_eq!(all.len(), 3);
    let playing = async {
        loop {
            match worker.command().await {
                Command::Next(step) => {
                    assert_eq!(step.streams, [opened[2]]);
                    worker.step_with_more(step.id);
                }
                Command::Close(stream) => assert!(opened.contains(&stream)),
                other => panic!("{other:?}"),
            }
        }
    };
    let reading = async {
        let mut seen = Vec::new();
        for reply in replies {
            seen.push(reply.await.unwrap());
        }
        seen
    };
    let seen = tokio::select! {
        () = playing => unreachable!("endless"),
        seen = reading => seen,
    };
    assert!(matches!(seen[0].last(), Some(Err(RequestFailure::Internal(why))) if why.contains("broken")));
    assert!(seen[1].iter().all(Result::is_ok) && seen[1].len() < 50, "it ended");
    assert!(seen[2].iter().all(Result::is_ok) && seen[2].len() == 50, "its client had enough");
}

#[tokio::test]
async fn a_client_that_leaves_before_its_first_answer_closes_its_stream() {
    let stage = stepping();
    let worker = stage.enter(1);
    // The client disconnects while the stream opens.
    let reply = request(&stage);
    let batch = worker.batch().await;
    reply.abort();
    assert!(reply.await.is_err());
    worker.started(batch.id);
    assert_eq!(worker.closed().await, batch.id);
    // The client disconnects in the first step.
    let reply = request(&stage);
    let opened = worker.start().await;
    let step = worker.step().await;
    reply.abort();
    assert_eq!(worker.closed().await, opened);
    worker.stepped(step.id, vec![StreamAnswer { result: Ok(number(0)), more: true }]);
    assert_eq!(stage.pipeline.state.lock().scheduler.open_streams(), 0);
    assert_eq!(stage.pipeline.report().counts.cancelled, 2);
}

#[tokio::test]
async fn a_request_without_its_first_answer_opens_its_stream_again_if_the_worker_dies() {
    let stage = stepping();
    let worker = stage.enter(1);
    let reply = request(&stage);
    worker.start().await;
    worker.step().await;
    drop(worker);
    let again = stage.enter(2);
    let opened = again.start().await;
    assert_eq!(again.advance(5).await, [opened]);
    assert_eq!(next_number(&mut reply.await.unwrap().unwrap()).await, 5);
}

#[tokio::test]
async fn a_full_worker_makes_requests_wait_until_their_deadline() {
    let stage = stepping();
    let worker = stage.enter(1);
    let slo = SloTarget { latency: Duration::from_millis(300), ..settings().live.slo };
    stage.pipeline.set_live_settings(LiveSettings { slo, reject_late: true, ..settings().live });
    let open = [request(&stage), request(&stage), request(&stage)];
    worker.open(3).await;
    let refused = request(&stage);
    let watch = watch(&stage);
    let failure = tokio::time::timeout(Duration::from_secs(10), refused).await.unwrap();
    let failure = failure.unwrap().unwrap_err();
    watch.abort();
    drop(open);
    assert!(matches!(&failure, RequestFailure::Unavailable(_)), "{failure:?}");
}

#[tokio::test]
async fn an_answer_that_needs_several_steps_comes_with_the_last_one() {
    let stage = stepping();
    let worker = stage.enter(1);
    let reply = request(&stage);
    let opened = worker.start().await;
    let not_yet = || vec![StreamAnswer { result: Ok(Vec::new()), more: true }];
    for _ in 0..3 {
        let step = worker.step().await;
        assert_eq!(step.streams, [opened]);
        worker.stepped(step.id, not_yet());
    }
    assert_eq!(worker.advance(1).await, [opened]);
    let mut answers = reply.await.unwrap().unwrap();
    worker.stepped(worker.step().await.id, not_yet());
    assert_eq!(worker.advance(2).await, [opened]);
    assert_eq!((next_number(&mut answers).await, next_number(&mut answers).await), (1, 2));
    worker.stepped(worker.step().await.id, not_yet());
    drop(answers);
    loop {
        match worker.command().await {
            Command::Next(step) => worker.stepped(step.id, not_yet()),
            Command::Close(stream) => break assert_eq!(stream, opened),
            other => panic!("{other:?}"),
        }
    }
}
