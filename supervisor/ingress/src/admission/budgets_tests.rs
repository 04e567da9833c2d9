use super::*;

fn pools(requests: u64) -> Arc<Pools> {
    Arc::new(Pools::new(requests, 0, 0))
}

fn greedy(client: &Arc<Client>) -> Vec<Taken> {
    std::iter::from_fn(|| client.take(Pool::Requests, 1)).collect()
}

#[test]
fn a_connection_gets_half_and_many_leave_room_for_one_more() {
    let pools = pools(65_536);
    let mut held = Vec::new();
    for connections in 1..=60 {
        held.push(greedy(&Arc::new(pools.client(Owner::User(1)))));
        assert!(connections > 1 || held[0].len() == 32_768);
        let newcomer = Arc::new(pools.client(Owner::User(1)));
        assert!(newcomer.take(Pool::Requests, 1).is_some(), "beside {connections}");
    }
    drop(held);
    assert_eq!(pools.taken(Pool::Requests), 0);
}

#[test]
fn a_peer_with_many_connections_leaves_room_for_others() {
    let pools = pools(80);
    let held: Vec<_> = (0..200).map(|_| greedy(&Arc::new(pools.client(Owner::User(1))))).collect();
    assert_eq!(held.iter().map(Vec::len).sum::<usize>(), 75);
    assert!(Arc::new(pools.client(Owner::User(2))).take(Pool::Requests, 1).is_some());
}

#[test]
fn the_only_place_can_be_taken_and_amounts_change() {
    let client = Arc::new(pools(1).client(Owner::User(0)));
    let taken = client.take(Pool::Requests, 1).unwrap();
    assert!(client.take(Pool::Requests, 1).is_none() && !taken.set(2));
    assert!(taken.set(0) && taken.set(1));
    drop(taken);
    assert_eq!(client.has(Pool::Requests), 0);
}

#[test]
fn peers_that_have_gone_are_forgotten() {
    let pools = pools(1);
    for user in 0..10_000 {
        drop(pools.client(Owner::User(user)));
    }
    assert!(pools.peers.lock().len() < 100);
}
