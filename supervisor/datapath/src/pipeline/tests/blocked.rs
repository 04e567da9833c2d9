//! Tests workers whose sockets accept no data for a while.

use super::*;

#[tokio::test]
async fn a_batch_that_an_idle_worker_could_not_take_is_sent_later_without_another_request() {
    let stage = Stage::new();
    let mut stuffed = 0;
    let worker = stage.enter_as(1, Sms(10), |_, socket| {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        while send(socket.as_raw_fd(), &[0], flags).is_ok() {
            stuffed += 1;
        }
    });
    watch(&stage);
    let reply = stage.request();
    stage.until((1, 0)).await;
    for _ in 0..stuffed {
        recv(worker.socket.as_raw_fd(), &mut [0], MsgFlags::empty()).unwrap();
    }
    worker.answer_well(&worker.batch().await);
    assert_eq!(reply.await.unwrap(), Ok(good()));
}
