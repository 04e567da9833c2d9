//! Tests the limits of the queue and of the request memory. Cancelled requests must free queue
//! places and memory.

use super::*;

#[tokio::test]
async fn the_queue_has_its_bound_and_cancelled_requests_make_room() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let running = stage.request();
    let batch = worker.batch().await;
    // The socket has room for one more batch, and four more requests wait in the queue.
    let second = stage.request();
    stage.until((0, 2)).await;
    let waiting: Vec<_> = (0..4).map(|_| stage.request()).collect();
    stage.until((4, 2)).await;
    let refused = stage.request().await.unwrap();
    assert!(matches!(refused, Err(RequestFailure::Unavailable(why)) if why.contains("full")));
    waiting[0].abort();
    while !waiting[0].is_finished() {
        tokio::task::yield_now().await;
    }
    let stays = stage.request();
    worker.answer_well(&batch);
    let mut answered = 1;
    while answered < 6 {
        let batch = worker.batch().await;
        answered += batch.requests.len();
        worker.answer_well(&batch);
    }
    for request in [running, second, stays] {
        assert_eq!(request.await.unwrap(), Ok(good()));
    }
    let counts = stage.pipeline.report().counts;
    assert_eq!((counts.accepted, counts.succeeded, counts.rejected, counts.cancelled), (7, 6, 1, 1));
}

/// Tests that a cancelled request does not occupy a place in a full queue. The request is cancelled
/// while it executes, and is then put back into the queue.
#[tokio::test]
async fn the_queue_makes_room_when_a_cancelled_request_is_put_back() {
    let mut stage = Stage::new();
    let worker = stage.enter(1);
    let leaves = stage.request();
    let _unanswered = worker.batch().await;
    let second = stage.request();
    stage.until((0, 2)).await;
    leaves.abort();
    while !leaves.is_finished() {
        tokio::task::yield_now().await;
    }
    // This search finds no settled request, because the cancelled request still executes.
    stage.pipeline.state.lock().scheduler.forget_settled();
    drop(worker);
    assert_eq!(stage.event().await, LaneEvent::Gone(WorkerId(1)));
    let waiting: Vec<_> = (0..3).map(|_| stage.request()).collect();
    while stage.pipeline.report().counts.accepted < 5 {
        assert_eq!(stage.pipeline.report().counts.rejected, 0);
        tokio::task::yield_now().await;
    }
    drop((second, waiting));
}

#[tokio::test]
async fn the_memory_has_its_bound_and_cancelled_requests_make_room() {
    let stage = Stage::new();
    let half = || stage.request_with(Bytes::from(vec![0; MEMORY_BYTES / 2]));
    let (leaves, stays) = (half(), half());
    stage.until((2, 0)).await;
    let refused = half().await.unwrap();
    assert!(matches!(refused, Err(RequestFailure::Unavailable(why)) if why.contains("memory")));
    leaves.abort();
    while !leaves.is_finished() {
        tokio::task::yield_now().await;
    }
    let instead = half();
    while stage.pipeline.report().counts.accepted < 3 && !instead.is_finished() {
        tokio::task::yield_now().await;
    }
    let worker = stage.enter(1);
    worker.answer_well(&worker.batch().await);
    assert_eq!((stays.await.unwrap(), instead.await.unwrap()), (Ok(good()), Ok(good())));
    let counts = stage.pipeline.report().counts;
    assert_eq!((counts.accepted, counts.rejected, counts.cancelled), (3, 1, 1));
}
