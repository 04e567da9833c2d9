use super::*;

const SLO: Duration = Duration::from_millis(20);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn at(after: u64) -> Timestamp {
    Timestamp::after_origin(ms(after))
}

fn answer(recorder: &mut TrafficRecorder, latency: u64, now: u64) {
    recorder.record_answer(ms(latency), SLO, at(now));
}

fn end(recorder: &mut TrafficRecorder, how: Unanswered, now: u64) {
    recorder.record_unanswered(how, SLO, at(now));
}

#[test]
fn an_observation_covers_the_time_since_the_previous_one() {
    let mut recorder = TrafficRecorder::new(at(0));
    (1..=5).for_each(|rows| recorder.record_arrival(rows));
    for how in [Unanswered::Overloaded, Unanswered::Refused, Unanswered::Failed] {
        end(&mut recorder, how, 10);
    }
    recorder.set_busy(true, at(20));
    recorder.set_busy(true, at(30));
    recorder.set_busy(false, at(40));
    recorder.set_busy(true, at(90));
    recorder.record_answer(Duration::from_micros(19_500), SLO, at(90));
    recorder.record_answer(Duration::from_micros(20_500), SLO, at(90));
    for (rows, took) in [(8, 7), (2, 3), (2, 5)] {
        recorder.record_batch(rows, ms(took));
    }
    let seen = recorder.observe(2, at(100));
    assert_eq!((seen.span, seen.arrived, seen.rows), (ms(100), 5, 15));
    assert_eq!((seen.refused, seen.queued, seen.attainment), (1, 2, Some(0.2)));
    assert_eq!((seen.answered, seen.mean_latency), (2, ms(20)));
    assert_eq!(seen.in_time_at_client, 0, "a twentieth of the SLO is for the way");
    assert!(seen.p99_latency.abs_diff(ms(21)) < ms(1), "{:?}", seen.p99_latency);
    assert!((seen.busy - 0.3).abs() < 1e-9, "{}", seen.busy);
    let executed = |rows, count, took| BatchStats { rows, count, mean: ms(took) };
    assert_eq!(seen.batches, [executed(2, 2, 4), executed(8, 1, 7)]);
    let next = recorder.observe(0, at(150));
    assert_eq!(next, Observation { span: ms(50), busy: 1.0, ..Observation::default() }, "one still executes");
}

#[test]
fn nothing_at_all_in_no_time_is_no_division_by_zero() {
    assert_eq!(TrafficRecorder::new(at(7)).observe(0, at(7)), Observation::default());
}

#[test]
fn sizes_have_their_bound_and_another_share_its_own_times() {
    let mut recorder = TrafficRecorder::new(at(0));
    (0..10_000).for_each(|rows| recorder.record_batch(rows, ms(1)));
    assert_eq!(recorder.interval.executed.len(), MAX_SIZES);
    recorder.forget_batches();
    assert!(recorder.observe(0, at(1)).batches.is_empty());
}

#[test]
fn recent_traffic_covers_ten_seconds_and_the_one_that_has_begun() {
    let mut recorder = TrafficRecorder::new(at(0));
    assert_eq!(recorder.recent(at(0)), TrafficWindow::default());
    recorder.set_busy(true, at(0));
    (0..200).for_each(|n| answer(&mut recorder, 1, n * 100));
    let recent = recorder.recent(at(19_950));
    assert_eq!((recent.span, recent.counts.answered), (ms(10_950), 110));
    assert!((recent.rate(110) - 110.0 / 10.95).abs() < 1e-9, "{recent:?}");
    assert_eq!((recent.counts.busy, recent.busy()), (ms(10_950), 1.0));
    recorder.set_busy(false, at(35_000));
    let recent = recorder.recent(at(40_500));
    assert_eq!((recent.span, recent.counts.ended(), recent.counts.busy), (ms(10_500), 0, ms(5_000)));
    assert_eq!(recorder.recent(at(90_000)).counts, TrafficCounts::default());
    assert_eq!(recorder.total().answered, 200);
}

#[test]
fn after_a_start_recent_traffic_covers_less_and_a_rate_covers_a_second_at_least() {
    let mut recorder = TrafficRecorder::new(at(0));
    for how in [Unanswered::Refused, Unanswered::TimedOut, Unanswered::Cancelled(ms(1))] {
        end(&mut recorder, how, 100);
    }
    answer(&mut recorder, 1, 100);
    let recent = recorder.recent(at(500));
    let TrafficCounts { refused, failed, cancelled, .. } = recent.counts;
    assert_eq!((recent.span, refused, failed, cancelled), (ms(500), 1, 1, 1));
    assert_eq!(recent.rate(recent.counts.ended()), 4.0);
    assert_eq!(recorder.recent(at(2_000)).rate(4), 2.0);
}

#[test]
fn the_last_second_is_a_full_one() {
    let mut recorder = TrafficRecorder::new(at(0));
    answer(&mut recorder, 10, 100);
    answer(&mut recorder, 30, 200);
    end(&mut recorder, Unanswered::Failed, 300);
    assert_eq!(recorder.last_second(at(999)), TrafficCounts::default(), "nothing is full yet");
    let load = |counts: TrafficCounts| (counts.answered, counts.slo_parts, counts.failed);
    assert_eq!(load(recorder.last_second(at(1_000))), (2, 2.0, 1));
    answer(&mut recorder, 5, 1_500);
    assert_eq!(load(recorder.last_second(at(1_999))), (2, 2.0, 1));
    assert_eq!(load(recorder.last_second(at(2_000))), (1, 0.25, 0));
    answer(&mut recorder, 5, 2_100);
    assert_eq!(recorder.last_second(at(9_000)), TrafficCounts::default(), "it has been idle");
}

#[test]
fn a_client_that_cancels_a_late_request_does_not_hide_the_miss() {
    let mut recorder = TrafficRecorder::new(at(0));
    for how in [Unanswered::Failed, Unanswered::Cancelled(ms(20)), Unanswered::Cancelled(ms(19))] {
        end(&mut recorder, how, 1);
    }
    answer(&mut recorder, 10, 1);
    assert_eq!(recorder.total().attainment(), Some(1.0 / 3.0));
    assert_eq!((recorder.total().failed, recorder.total().cancelled), (1, 2));
    assert_eq!(recorder.total().unserved, 1, "a failure says nothing about the share");
}

#[test]
fn taken_latencies_cover_the_answers_since_the_previous_call() {
    let mut recorder = TrafficRecorder::new(at(0));
    assert_eq!(recorder.take_latencies(), None);
    (0..99).for_each(|_| answer(&mut recorder, 10, 1));
    answer(&mut recorder, 300, 1);
    let near = |taken: RecentLatencies, p50: f64, p99: f64| {
        assert!((taken.p50_ms / p50 - 1.0).abs() < 0.01 && (taken.p99_ms / p99 - 1.0).abs() < 0.01);
    };
    near(recorder.take_latencies().unwrap(), 10.0, 10.0);
    answer(&mut recorder, 300, 2);
    near(recorder.take_latencies().unwrap(), 300.0, 300.0);
    assert_eq!(recorder.take_latencies(), None);
}

#[test]
fn the_minutes_cover_the_known_time_and_forget_old_windows() {
    let mut recorder = TrafficRecorder::new(at(10_000));
    let rate = |recorder: &mut TrafficRecorder, now| {
        let traffic = recorder.latencies(99.0, at(now)).traffic;
        traffic.rate(traffic.counts.offered())
    };
    answer(&mut recorder, 10, 10_000);
    assert_eq!(rate(&mut recorder, 10_000), 1.0, "a rate covers a second at least");
    end(&mut recorder, Unanswered::Overloaded, 11_000);
    assert_eq!(rate(&mut recorder, 14_000), 0.5);
    end(&mut recorder, Unanswered::Failed, 90_000);
    assert_eq!(rate(&mut recorder, 90_000), 3.0 / 80.0);
    assert_eq!(rate(&mut recorder, 160_000), 1.0 / 70.0, "the first window is gone");
    assert_eq!(rate(&mut recorder, 400_000), 0.0);
}

#[test]
fn attainment_counts_refused_requests_and_forgets_old_windows() {
    let mut recorder = TrafficRecorder::new(at(0));
    let attainment =
        |recorder: &mut TrafficRecorder, now| recorder.latencies(75.0, at(now)).traffic.counts.attainment();
    assert_eq!(attainment(&mut recorder, 0), None);
    assert_eq!(recorder.latencies(75.0, at(0)).slo_percentile_ms, None);
    answer(&mut recorder, 10, 1_000);
    answer(&mut recorder, 30, 1_000);
    for how in
        [Unanswered::Overloaded, Unanswered::Failed, Unanswered::Overloaded, Unanswered::Cancelled(ms(1))]
    {
        end(&mut recorder, how, 2_000);
    }
    assert_eq!(attainment(&mut recorder, 3_000), Some(0.2));
    let slow = recorder.latencies(75.0, at(3_000)).slo_percentile_ms.unwrap();
    assert!((slow - 30.0).abs() < 0.5, "{slow}");
    answer(&mut recorder, 10, 70_000);
    assert_eq!(attainment(&mut recorder, 70_000), Some(2.0 / 6.0));
    assert_eq!(attainment(&mut recorder, 300_000), None);
    assert_eq!((recorder.total().answered, recorder.total().in_time), (3, 2));
}
