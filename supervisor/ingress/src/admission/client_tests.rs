use super::*;

fn budgets(requests: u64) -> Arc<Budgets> {
    Arc::new(Budgets::new(requests, 0, 0))
}

fn greedy(client: &Arc<Client>) -> Vec<BudgetShare> {
    std::iter::from_fn(|| client.take(Budget::Requests, 1)).collect()
}

#[test]
fn a_connection_gets_half_and_many_leave_room_for_one_more() {
    let budgets = budgets(65_536);
    let mut held = Vec::new();
    for connections in 1..=60 {
        held.push(greedy(&Arc::new(Client::new(&budgets, Owner::User(1)))));
        assert!(connections > 1 || held[0].len() == 32_768);
        let newcomer = Arc::new(Client::new(&budgets, Owner::User(1)));
        assert!(newcomer.take(Budget::Requests, 1).is_some(), "{connections} connections are there");
    }
    drop(held);
    assert_eq!(budgets.used(Budget::Requests), 0);
}

#[test]
fn a_peer_with_many_connections_leaves_room_for_others() {
    let budgets = budgets(80);
    let held: Vec<_> = (0..200).map(|_| greedy(&Arc::new(Client::new(&budgets, Owner::User(1))))).collect();
    assert_eq!(held.iter().map(Vec::len).sum::<usize>(), 75);
    assert!(Arc::new(Client::new(&budgets, Owner::User(2))).take(Budget::Requests, 1).is_some());
}

#[test]
fn the_only_place_can_be_share_and_amounts_change() {
    let client = Arc::new(Client::new(&budgets(1), Owner::User(0)));
    let share = client.take(Budget::Requests, 1).unwrap();
    assert!(client.take(Budget::Requests, 1).is_none() && !share.set(2));
    assert!(share.set(0) && share.set(1));
    drop(share);
    assert_eq!(client.used(Budget::Requests), 0);
}

#[test]
fn peers_that_have_gone_are_forgotten() {
    let budgets = budgets(1);
    for user in 0..10_000 {
        drop(Client::new(&budgets, Owner::User(user)));
    }
    assert!(budgets.peers.lock().len() < 100);
}
