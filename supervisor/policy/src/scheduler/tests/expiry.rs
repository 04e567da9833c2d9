//! Tests requests that no batch could answer in time for their clients, and the time that batches have.

use super::*;

fn refusals(model: &mut Scheduler<(), Asked>, requests: &[(u32, u64)], now: Timestamp) -> Vec<RefusalReason> {
    let expiring =
        |&(number, expires): &(u32, u64)| QueuedRequest { expires: Some(at(expires)), ..request(number, 0) };
    requests
        .iter()
        .filter_map(|asked| model.accept(expiring(asked), now).err().map(|refused| refused.why))
        .collect()
}

#[test]
fn requests_whose_clients_would_not_wait_are_refused_on_arrival() {
    let mut model = serving();
    assert_eq!(refusals(&mut model, &[(1, 0)], at(0)), [RefusalReason::Expires], "it has expired");
    assert_eq!(refusals(&mut model, &[(2, 1)], at(0)), [], "an idle lane gets every request");
    go(&mut model, at(0));
    // The batch ends after 11 ms. A batch behind it ends after 22 ms.
    assert_eq!(refusals(&mut model, &[(3, 21), (4, 23)], at(0)), [RefusalReason::Expires]);
    assert_eq!(numbers(&model.drain_queue()), [4]);
}

#[test]
fn a_request_whose_client_will_not_wait_for_its_batch_is_not_sent() {
    let mut model = serving();
    model.accept(request(0, 0), at(0)).unwrap();
    go(&mut model, at(0));
    (1..=4).for_each(|number| drop(model.accept(request(number, 0), at(0)).unwrap()));
    // The batch of the four requests ends after 25 ms, and the batch behind it after 36 ms.
    let patient = QueuedRequest { deadline: at(51), expires: Some(at(200)), ..request(6, 0) };
    assert_eq!(refusals(&mut model, &[(5, 40)], at(0)), []);
    model.accept(patient, at(0)).unwrap();
    go(&mut model, at(11));
    answer(&mut model, WORKER, ms(11), at(30));
    let (sent, refused, _) = go(&mut model, at(45));
    assert_eq!((sent, refused), (vec![(WORKER, vec![6])], vec![5]));
}

#[test]
fn the_slack_of_a_batch_is_that_of_the_requests_behind_it() {
    let mut model = serving();
    model.accept(request(0, 0), at(0)).unwrap();
    go(&mut model, at(0));
    // The batch ends after 11 ms. A request that arrives now is answered after another 11 ms.
    assert_eq!(model.running_batch(WORKER, at(0)).unwrap().slack, SLO - ms(22));
    (1..=7).for_each(|number| drop(model.accept(request(number, 0), at(0)).unwrap()));
    // With this request, two batches of four rows are behind it, which take 14 ms each.
    assert_eq!(model.running_batch(WORKER, at(0)).unwrap().slack, SLO - ms(11 + 2 * 14));
    model.route(None);
    assert_eq!(model.running_batch(WORKER, at(0)).unwrap().slack, SLO - ms(11));
}
