//! When a model should have more SMs at once: as its slack runs out, or as more comes than its share was chosen for.
//!
//! Slack shows what is wrong for certain, but only once a queue has built up, which takes some time where a little too much
//! comes. Arrivals show it sooner the larger the change is, and before anybody is late.

use std::time::Duration;

use shadowslice_shared::units::Moment;

/// A model that was heard is not heard again for so long.
const PAUSE: Duration = Duration::from_millis(10);

/// What says that a model should have more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sign {
    /// Several requests should be answered too late.
    SlackRunsOut,
    /// More requests come than the share was chosen for.
    TooManyCome,
}

/// A sign, and since when it shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alarm {
    /// What it is.
    pub sign: Sign,
    /// Since when.
    pub since: Moment,
}

/// Watches one model, while it could have more SMs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Pressure {
    slack: Slack,
    rise: Rise,
    quiet_until: Moment,
}

impl Pressure {
    /// Whether a sign would be news.
    pub fn is_heard(&self, now: Moment) -> bool {
        now >= self.quiet_until
    }

    /// Notes a request that comes now and should be `answered` at that moment, or is tried at once.
    pub fn note(
        &mut self,
        answered: Option<Moment>,
        deadline: Moment,
        watch: Watch,
        now: Moment,
    ) -> Option<Alarm> {
        let risen = self.rise.note(watch, now).map(|since| Alarm { sign: Sign::TooManyCome, since });
        let short = self.slack.runs_out(answered, deadline, watch.short);
        let alarm = risen.or(short.then_some(Alarm { sign: Sign::SlackRunsOut, since: now }));
        if alarm.is_some() {
            *self = Self { quiet_until: now + PAUSE, ..Self::default() };
        }
        alarm
    }

    /// So many requests that seemed in time when they came are too late now that they should be sent: the next one that comes tells.
    pub fn too_late(&mut self, requests: usize) {
        self.slack.turned_out(requests);
    }
}

/// Slack has run out when so many requests had none, beyond those that others made up for: they should be answered too late. Some are
/// also where a neighbour executes for a moment, who is not kept out by a larger share but pushed aside;
pub const SHORT: u16 = 32;

/// and where many requests come, all of such a moment, in seconds.
const MOMENT_S: f64 = 0.1;

/// What each request that had some makes up for: a burst alone is no reason to change a share.
const MADE_UP: f64 = 0.05;

/// Whether a model's slack runs out.
#[derive(Debug, Clone, PartialEq, Default)]
struct Slack {
    /// Requests that had none, less what others made up for.
    short: f64,
}

impl Slack {
    /// Notes a request. Whether that makes it so many that had none.
    fn runs_out(&mut self, answered: Option<Moment>, deadline: Moment, many: f64) -> bool {
        let has_none = answered.is_some_and(|answered| answered > deadline);
        self.short = if has_none { self.short + 1.0 } else { (self.short - MADE_UP).max(0.0) };
        self.short >= many
    }

    /// So many had none after all.
    fn turned_out(&mut self, requests: usize) {
        self.short += requests as f64;
    }
}

/// A rate at which requests may come and a higher one, as what an arrival speaks for the higher one, and a second against it. If arrivals are
/// independent, `n` of them in `t` seconds are `(higher / expected)^n * e^-((higher - expected) * t)` times as likely at the higher one; this
/// is the logarithm of that. What varies more or less than they do speaks for as much less or more, by the dispersion.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rates {
    an_arrival: f64,
    a_second: f64,
}

impl Rates {
    const NONE: Self = Self { an_arrival: 0.0, a_second: 0.0 };

    fn new(expected: f64, higher: f64, dispersion: f64) -> Self {
        let an_arrival = (higher / expected).ln() / dispersion;
        Self { an_arrival, a_second: (higher - expected) / dispersion }
    }
}

/// Rates that would be too many requests: as few as that, and many times more. A rise is seen soonest by who looks for one of its size.
const HIGHER: [f64; 2] = [1.0, 1.6];

/// What is watched for: more requests than a share is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Watch {
    /// Requests a second that are expected.
    expected: f64,
    higher: [Rates; HIGHER.len()],
    /// The score at which too many come,
    sure: f64,
    /// and how many requests without slack are too many.
    short: f64,
}

/// No arrivals are taken to be more even than with this dispersion: the way to the host is not.
const MOST_EVEN: f64 = 0.36;

/// Nobody can say that fewer come than this part of what would be too many: he who was idle may be so no more.
const FEWEST: f64 = 0.05;

/// Where as many come as expected, independently, each test errs once in this many seconds at most, a day. By Lorden (1971) it does so
/// once in e to the score arrivals, and none that errs as seldom is sure sooner by much.
const ERRS_ONCE_IN_S: f64 = 86_400.0;

/// Nobody is sure with a score of less, however seldom requests come: a few that come together are no news.
const LEAST_SURE: f64 = 16.0;

impl Watch {
    /// Nothing is too much, and little is expected.
    pub const OFF: Self =
        Self { expected: 0.0, higher: [Rates::NONE; HIGHER.len()], sure: f64::INFINITY, short: SHORT as f64 };

    /// Requests a second that are expected, and those that are too many. `dispersion` is the variance of arrivals by their
    /// mean: 1 where they are independent, and as many times as much must come to be sure. From cameras, say, they come more
    /// evenly, and less will do.
    pub fn new(expected: f64, too_many: f64, dispersion: f64) -> Self {
        let expected = expected.max(FEWEST * too_many);
        if too_many <= expected {
            return Self::of_slack(expected);
        }
        let rates = |times| Rates::new(expected, times * too_many, dispersion.max(MOST_EVEN));
        let sure = (expected * ERRS_ONCE_IN_S).ln().max(LEAST_SURE);
        Self { higher: HIGHER.map(rates), sure, ..Self::of_slack(expected) }
    }

    /// Only slack is watched, as nobody can say how many would be too many, of so many requests a second that are expected.
    pub fn of_slack(expected: f64) -> Self {
        Self { expected, short: (expected * MOMENT_S).max(f64::from(SHORT)), ..Self::OFF }
    }
}

/// Page's cumulative sum test (1954) of arrivals: of the two rates, how much likelier is the higher one since it best explains them? The
/// score is the logarithm.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Score {
    score: f64,
    /// When that was last nothing.
    since: Moment,
}

impl Score {
    /// Notes an arrival so many seconds after the one before, which says nothing if it is `overdue`. If that is `sure` to be too many: since when.
    fn note(&mut self, rates: Rates, sure: f64, after_s: f64, overdue: bool, now: Moment) -> Option<Moment> {
        let before = self.score - rates.a_second * after_s;
        if before <= 0.0 {
            self.since = now;
        }
        self.score = before.max(0.0) + if overdue { 0.0 } else { rates.an_arrival };
        (self.score >= sure).then_some(self.since)
    }
}

/// Requests are held up for less than this, in seconds; in a longer pause nobody asked.
const HELD_UP_S: f64 = 0.25;

/// So many requests too few in a pause are chance.
const BY_CHANCE: f64 = 2.0;

/// Requests that should have come and did not. What held them up, a busy host or a network, lets them go all at once, and then no more
/// come than before.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Overdue(f64);

impl Overdue {
    /// Notes an arrival so many seconds after the one before, where so many a second are expected. Whether it was overdue.
    fn note(&mut self, expected: f64, after_s: f64) -> bool {
        let forgotten = after_s / HELD_UP_S;
        let missing = if forgotten < 1.0 { expected * after_s - BY_CHANCE } else { 0.0 };
        self.0 = self.0 * (1.0 - forgotten).max(0.0) + missing.max(0.0);
        let overdue = self.0 >= 1.0;
        if overdue {
            self.0 -= 1.0;
        }
        overdue
    }
}

/// Whether more requests come, by a test for each of the higher rates.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Rise {
    scores: [Score; HIGHER.len()],
    overdue: Overdue,
    last: Moment,
}

impl Rise {
    /// Notes an arrival. If too many come: since when.
    fn note(&mut self, watch: Watch, now: Moment) -> Option<Moment> {
        let after_s = now.since(self.last).as_secs_f64();
        self.last = now;
        let overdue = self.overdue.note(watch.expected, after_s);
        let tests = self.scores.iter_mut().zip(watch.higher);
        tests.fold(None, |alarm, (score, rates)| {
            score.note(rates, watch.sure, after_s, overdue, now).or(alarm)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Moment {
        Moment::after_origin(Duration::from_millis(ms))
    }

    #[test]
    fn slack_runs_out_when_several_requests_have_none() {
        let mut slack = Slack::default();
        let mut note = |answered: Option<u64>| slack.runs_out(answered.map(ms), ms(200), Watch::OFF.short);
        assert!(!(0..31).any(|_| note(Some(201))));
        assert!(
            !(0..20).any(|_| note(Some(200))) && !note(None),
            "twenty with slack make up for one without"
        );
        assert_eq!([300; 3].map(|at| note(Some(at))), [false, false, true]);
    }

    #[test]
    fn requests_that_turn_out_to_be_too_late_had_no_slack() {
        let heard = |now: u64, pressure: &mut Pressure| {
            pressure.note(Some(ms(now)), ms(now + 1), Watch::OFF, ms(now)).map(|alarm| alarm.sign)
        };
        let mut pressure = Pressure::default();
        pressure.too_late(32);
        assert_eq!(heard(1, &mut pressure), None, "the next one makes up for some of it");
        pressure.too_late(1);
        assert_eq!(heard(2, &mut pressure), Some(Sign::SlackRunsOut));
        assert_eq!(heard(20, &mut pressure), None, "it is told once");
    }

    #[test]
    fn where_many_come_a_moment_without_slack_is_no_alarm() {
        // How many in a row, as many as are expected, all of which should be answered too late.
        let alarmed_after = |per_s: u32, times: f64| {
            let watch = Watch::new(per_s.into(), times * f64::from(per_s), 1.0);
            let mut pressure = Pressure::default();
            let mut note = |n: u32| {
                let now = ms(1_000) + Duration::from_secs(n.into()) / per_s;
                pressure.note(Some(now + Duration::from_millis(1)), now, watch, now)
            };
            (1..10_000).find_map(|n| note(n).map(|alarm| (alarm.sign, n)))
        };
        let after = |requests: u32| Some((Sign::SlackRunsOut, requests));
        assert_eq!([100, 320].map(|per_s| alarmed_after(per_s, 2.0)), [after(32); 2]);
        assert_eq!(alarmed_after(2_000, 2.0), after(200), "those of a tenth of a second");
        assert_eq!(alarmed_after(2_000, 0.5), after(200), "though arrivals are not watched");
    }

    #[test]
    fn the_more_come_the_surer_it_must_be() {
        // 1,000 a second are e to the 18.3 in a day.
        let sure = |expected: f64| Watch::new(expected, 20.0 * expected, 1.0).sure;
        assert!((sure(1_000.0) - 18.3).abs() < 0.1, "{}", sure(1_000.0));
        assert!((sure(10_000.0) - sure(1_000.0) - 10_f64.ln()).abs() < 1e-9);
        assert_eq!([1.0, 100.0].map(sure), [LEAST_SURE; 2]);
        // Of four times as many each counts ln 3.2 less 0.55: 27 of them come to 16, and 34 to 20.6.
        let count = rise(10_000.0, 20_000.0, 1.0, Duration::from_micros(25), 1_000).unwrap().1;
        assert!((33..=35).contains(&count), "{count}");
    }

    /// The alarm that requests so far apart lead to, and how many it took, where so many a second are expected or too many.
    fn rise(
        expected: f64,
        too_many: f64,
        dispersion: f64,
        gap: Duration,
        requests: u32,
    ) -> Option<(Alarm, u32)> {
        let watch = Watch::new(expected, too_many, dispersion);
        let mut pressure = Pressure::default();
        (1..=requests).find_map(|count| {
            let now = ms(1_000) + gap * count;
            pressure.note(None, now, watch, now).map(|alarm| (alarm, count))
        })
    }

    #[test]
    fn more_than_the_share_is_for_is_noticed_the_sooner_the_more_it_is() {
        let after = |per_s| rise(30.0, 216.0, 1.0, Duration::from_secs(1) / per_s, 10_000);
        let (alarm, count) = after(420).unwrap();
        assert_eq!((alarm.sign, alarm.since), (Sign::TooManyCome, ms(1_000) + Duration::from_secs(1) / 420));
        assert!((8..=12).contains(&count), "{count}");
        assert!(after(2_000).unwrap().1 < count && after(216).unwrap().1 > count);
    }

    #[test]
    fn what_is_expected_and_what_is_between_is_no_alarm() {
        for per_s in [1, 30, 60, 90] {
            assert_eq!(rise(30.0, 216.0, 1.0, Duration::from_secs(1) / per_s, 10_000), None, "{per_s}");
        }
        assert_eq!(rise(300.0, 216.0, 1.0, Duration::from_micros(1), 10_000), None, "more is expected");
    }

    #[test]
    fn bursts_are_believed_less() {
        let count = |dispersion| rise(100.0, 200.0, dispersion, Duration::from_millis(2), 10_000).unwrap().1;
        assert!(count(4.0) > 3 * count(1.0));
    }

    #[test]
    fn even_arrivals_are_believed_sooner() {
        let count =
            |dispersion| rise(150.0, 380.0, dispersion, Duration::from_secs(1) / 450, 10_000).unwrap().1;
        assert!((37..=44).contains(&count(1.0)) && (11..=16).contains(&count(0.36)), "{}", count(0.36));
        assert_eq!(count(0.0), count(0.36), "there is a bound to that");
    }

    /// Whether evenly spaced requests alarm that are held up for so many ms after the 100th, 150 of which are expected a second.
    fn alarmed_by(held_up_ms: u64) -> bool {
        let watch = Watch::new(150.0, 380.0, 0.4);
        let mut pressure = Pressure::default();
        let due = |n: u32| ms(1_000) + Duration::from_secs(n.into()) / 150;
        let held_until = due(100) + Duration::from_millis(held_up_ms);
        (0..300).any(|n| {
            let now = if n > 100 { due(n).max(held_until) } else { due(n) };
            pressure.note(None, now, watch, now).is_some()
        })
    }

    #[test]
    fn requests_that_were_held_up_and_come_together_are_no_more_than_before() {
        assert_eq!([0, 20, 60, 100, 200].map(alarmed_by), [false; 5]);
        assert!(alarmed_by(300), "after so long they are news");
    }

    #[test]
    fn as_many_are_overdue_as_did_not_come_and_for_as_long_as_they_may_be_on_their_way() {
        let after_a_pause = |then: u32| {
            let mut overdue = Overdue::default();
            overdue.note(100.0, 0.12);
            for _ in 0..then {
                overdue.note(100.0, 0.01);
            }
            (0..100).filter(|_| overdue.note(100.0, 0.0)).count()
        };
        assert_eq!(after_a_pause(0), 9, "twelve should have come, of which two are chance and one came");
        assert_eq!([3, 5, 8].map(after_a_pause), [5, 2, 0], "as time goes by, more than came meanwhile");
    }

    #[test]
    fn an_idle_model_is_not_alarmed_by_a_few() {
        let count = rise(0.0, 100.0, 1.0, Duration::from_micros(1), 100).unwrap().1;
        assert_eq!(count, 5, "32 times as many each: 3.5 of 16");
    }

    #[test]
    fn who_was_heard_is_not_heard_for_a_while_and_then_afresh() {
        let mut pressure = Pressure::default();
        let mut note = |at| pressure.note(Some(ms(400)), ms(200), Watch::OFF, ms(at));
        assert!((0..31).all(|_| note(100).is_none()));
        assert_eq!(note(100), Some(Alarm { sign: Sign::SlackRunsOut, since: ms(100) }));
        assert!((0..31).all(|_| note(110).is_none()) && note(110).is_some());
        assert!(!pressure.is_heard(ms(119)) && pressure.is_heard(ms(120)));
    }
}
