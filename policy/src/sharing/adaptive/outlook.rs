//! The models of one GPU beside each other: what each has, and whom there is room for.

use std::collections::BTreeMap;

use shadowslice_shared::units::Sms;

use super::super::{Door, Facts, Terms};
use super::batching::Batching;
use super::contention::{Tenant, effective};
use super::model::{Model, Needs};

/// The part of a GPU that is planned for. What all models take at least, in full batches, is less than what they
/// take as requests really come.
pub(super) const FULL: f64 = 0.88;

/// Requests a second that a model is let in with to which they are of no use, while a higher priority misses its SLO: what
/// they take is not forecast.
const TRIED_PER_S: f64 = 1.0;

/// Lets the models of one GPU learn from what was seen. What neighbours cost is told apart by how long each of
/// them executed; intervals in which a share changed teach nothing about that.
pub(super) fn observe(models: &mut [Model], terms: &[Terms], facts: &Facts, gpu: usize) {
    let here = on(gpu, terms);
    let tenant = |&model: &usize| {
        let live = &facts.models[model];
        Tenant { cap: f64::from(live.share.0), busy: live.seen.busy.clamp(0.0, 1.0) }
    };
    let tenants: Vec<Tenant> = here.iter().map(tenant).collect();
    let settled = here.iter().all(|&model| {
        let live = &facts.models[model];
        live.coming.is_none() && facts.now.since(live.since) >= live.seen.span
    });
    for (&model, sms) in here.iter().zip(effective(&tenants, f64::from(facts.gpus[gpu].0))) {
        models[model].observe(&terms[model], &facts.models[model], settled.then_some(sms));
    }
}

pub(super) fn on(gpu: usize, terms: &[Terms]) -> Vec<usize> {
    (0..terms.len()).filter(|&model| terms[model].gpu == gpu).collect()
}

/// The models of one GPU.
#[derive(Debug)]
pub(super) struct Outlook<'a> {
    models: &'a [Model],
    terms: &'a [Terms],
    gpu: f64,
    here: Vec<usize>,
    caps: Vec<f64>,
    /// The part of everybody's demand that is let in.
    admits: Vec<f64>,
}

impl<'a> Outlook<'a> {
    pub(super) fn of(models: &'a [Model], terms: &'a [Terms], shares: &[Sms], gpu: usize, sms: Sms) -> Self {
        let here = on(gpu, terms);
        let caps = here.iter().map(|&model| f64::from(shares[model].0)).collect();
        let gpu = f64::from(sms.0);
        let admits = admitted(&here, models, terms, gpu);
        Self { models, terms, gpu, here, caps, admits }
    }

    /// How each model batches and whom it lets in.
    pub(super) fn doors(&self) -> impl Iterator<Item = (usize, Door)> {
        self.batching().map(|(model, batching, admit)| {
            // Who is late even alone has nothing of others' waits.
            let asks = |&other: &usize| {
                let of_higher = self.terms[model].priority < self.terms[other].priority;
                let (asking, terms) = (&self.models[other], &self.terms[other]);
                other != model && asking.shortage().asks(of_higher) && !asking.hopeless(terms)
            };
            (model, self.models[model].door(&batching, admit, self.here.iter().any(asks)))
        })
    }

    /// The largest batch of each model.
    pub(super) fn largest_batches(&self) -> Vec<(usize, u32)> {
        self.batching().map(|(model, batching, _)| (model, batching.max())).collect()
    }

    /// The batches of each model when all execute that ever do, for batches that are planned for more come too late just when it matters; and
    /// which part of its demand is let in.
    fn batching(&self) -> impl Iterator<Item = (usize, Batching<'a>, f64)> {
        let (models, terms, gpu) = (self.models, self.terms, self.gpu);
        let present = |(&model, &cap): (&usize, &f64)| cap * models[model].presence(cap);
        let present: Vec<f64> = self.here.iter().zip(&self.caps).map(present).collect();
        let all: f64 = present.iter().sum();
        let each = self.here.iter().zip(&self.caps).zip(present).zip(&self.admits);
        each.map(move |(((&model, &cap), present), &admit)| {
            let fits = (gpu / (all - present + cap).max(1.0)).min(1.0);
            (model, models[model].batching(&terms[model], cap * fits, admit), admit)
        })
    }
}

/// The part of everybody's demand that is let in: what there is room for beside what higher ones need, as far as that is forecast, where one of
/// them misses its SLO; else what there is room for at best. A forecast that errs would refuse requests that nobody has to make room for.
fn admitted(here: &[usize], models: &[Model], terms: &[Terms], gpu: f64) -> Vec<f64> {
    let misses =
        |&&model: &&usize| models[model].shortage().is_missing() && !models[model].hopeless(&terms[model]);
    let highest = here.iter().filter(misses).map(|&model| terms[model].priority).min();
    let at_best = fitting(here, terms, gpu, |model| models[model].needs_at_least());
    let forecast = fitting(here, terms, gpu * FULL, |model| models[model].needs(&terms[model]));
    let gives_way = |&model: &usize| highest.is_some_and(|highest| terms[model].priority > highest);
    let parts = at_best.into_iter().zip(forecast).zip(here);
    parts
        .map(|((at_best, forecast), model)| match gives_way(model) {
            true if models[*model].hopeless(&terms[*model]) => forecast.min(tried(&models[*model])),
            true => forecast,
            false => at_best,
        })
        .collect()
}

/// The part of the demand of a model that cannot keep its SLO which says whether that is still so.
fn tried(model: &Model) -> f64 {
    TRIED_PER_S / model.demand.rate().max(TRIED_PER_S)
}

/// The part of everybody's needs that there is room for beside those of higher ones, the same within a priority but for floods. The
/// first is let in whole: what it cannot carry is too late by itself.
fn fitting(here: &[usize], terms: &[Terms], mut room: f64, needs: impl Fn(usize) -> Needs) -> Vec<f64> {
    let first = here.iter().map(|&model| terms[model].priority).min();
    if here.iter().all(|&model| Some(terms[model].priority) == first) {
        return vec![1.0; here.len()];
    }
    let mut classes: BTreeMap<u32, Vec<(usize, Needs)>> = BTreeMap::new();
    for (place, &model) in here.iter().enumerate() {
        classes.entry(terms[model].priority).or_default().push((place, needs(model)));
    }
    let mut admits = vec![1.0; here.len()];
    for (priority, class) in classes {
        if Some(priority) != first {
            parts_that_fit(&class, room).into_iter().for_each(|(place, part)| admits[place] = part);
        }
        room = (room - class.iter().map(|(_, needs)| needs.executed).sum::<f64>()).max(0.0);
    }
    admits
}

/// The part of each of these demands that there is room for: the same for all, but for those of which the whole GPU would not even execute
/// that. They take no room for the rest, so others are let in as if it did not come, and they as if it did.
fn parts_that_fit(class: &[(usize, Needs)], mut room: f64) -> Vec<(usize, f64)> {
    let mut asked: f64 = class.iter().map(|(_, needs)| needs.asked).sum();
    let part = |room: f64, asked: f64| if asked <= room { 1.0 } else { room / asked };
    let flooded = part(room, asked);
    let mut by_limit = class.to_vec();
    by_limit.sort_by(|(_, one), (_, other)| {
        (one.executed * other.asked).total_cmp(&(other.executed * one.asked))
    });
    let mut parts = Vec::with_capacity(class.len());
    for (place, needs) in by_limit {
        let even = part(room, asked);
        if even * needs.asked > needs.executed {
            (room, asked) = ((room - needs.executed).max(0.0), asked - needs.asked);
            parts.push((place, flooded));
        } else {
            parts.push((place, even));
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::super::super::fixtures::{live, profile, terms};
    use super::super::super::{Executed, Live, Seen};
    use super::*;

    const GPU: Sms = Sms(132);

    /// Half a second in which so many requests came, one batch each, and so many were late.
    fn came(arrived: u64, late: u64) -> Live {
        let executed = vec![Executed { rows: 1, count: arrived, mean: std::time::Duration::from_millis(3) }];
        let (answered, in_time, none) = (arrived, arrived - late, live(GPU));
        Live { seen: Seen { arrived, answered, in_time, executed, ..none.seen.clone() }, ..none }
    }

    /// Models of 2 ms and 70 ms·SM a row that have been seen so for a while; nothing yet if there is no interval.
    fn seen(terms: &[Terms], lives: &[Live], intervals: usize) -> Vec<Model> {
        let mut models: Vec<Model> = terms.iter().map(|terms| Model::new(terms, GPU)).collect();
        for _ in 0..intervals {
            for ((model, terms), live) in models.iter_mut().zip(terms).zip(lives) {
                model.observe(terms, live, None);
                model.observe_batches(terms, live, 16);
            }
        }
        models
    }

    fn of(slo_ms: u64, priority: u32) -> Terms {
        Terms { priority, profile: Some(profile(2.0, 70.0, 66)), ..terms("a", slo_ms) }
    }

    #[test]
    fn batches_leave_room_for_those_who_execute_and_not_for_those_who_are_never_asked() {
        let terms: Vec<Terms> = (0..12).map(|_| of(20, 1)).collect();
        let largest = |others: u64, intervals: usize| {
            let lives: Vec<Live> =
                (0..12).map(|model| came(if model == 0 { 100 } else { others }, 0)).collect();
            let models = seen(&terms, &lives, intervals);
            Outlook::of(&models, &terms, &[GPU; 12], 0, GPU).largest_batches()[0].1
        };
        assert_eq!((largest(0, 12), largest(100, 12)), (13, 2));
        assert_eq!(largest(0, 0), 2, "nobody has been looked at");
    }

    #[test]
    fn who_cannot_keep_his_slo_is_tried_only_while_a_higher_priority_misses_its_own() {
        let terms = [of(20, 1), of(2, 2), of(20, 2)];
        let admitted = |late: u64| {
            let models = seen(&terms, &[came(100, late), came(200, 200), came(100, 0)], 40);
            admitted(&[0, 1, 2], &models, &terms, 132.0)
        };
        assert_eq!(admitted(0), [1.0; 3]);
        let while_it_misses = admitted(30);
        assert!(while_it_misses[1] > 0.0 && while_it_misses[1] < 0.01, "{while_it_misses:?}");
        assert_eq!((while_it_misses[0], while_it_misses[2]), (1.0, 1.0));
    }

    #[test]
    fn who_cannot_keep_his_slo_with_all_that_he_may_have_is_hopeless_whatever_the_gpu_could_do() {
        let limited = Terms { max: Sms(14), ..of(5, 1) };
        let models = seen(&[limited.clone(), of(5, 1)], &[], 0);
        assert!(models[0].hopeless(&limited) && !models[1].hopeless(&of(5, 1)));
    }

    /// The parts of these demands, each by all that is asked for and what of it is executed, that this room is for.
    fn parts(demands: &[(f64, f64)], room: f64) -> Vec<f64> {
        let needs = demands.iter().map(|&(asked, executed)| Needs { asked, executed });
        let mut parts = parts_that_fit(&needs.enumerate().collect::<Vec<_>>(), room);
        parts.sort_by_key(|&(place, _)| place);
        parts.into_iter().map(|(_, part)| part).collect()
    }

    #[test]
    fn what_a_flood_executes_takes_room_and_what_it_asks_for_does_not() {
        assert_eq!(parts(&[(20.0, 20.0), (20.0, 20.0)], 50.0), [1.0; 2]);
        assert_eq!(parts(&[(20.0, 20.0), (60.0, 60.0)], 40.0), [0.5; 2]);
        assert_eq!(parts(&[(20.0, 20.0), (140.0, 10.0)], 20.0), [0.5, 0.125], "ten are left for the first");
        assert_eq!(parts(&[(150.0, 5.0), (10.0, 10.0), (240.0, 5.0)], 20.0), [0.05, 1.0, 0.05], "all as one");
        assert_eq!(parts(&[(20.0, 20.0), (100.0, 30.0)], 20.0), [20.0 / 120.0; 2], "less than it executes");
        assert_eq!(parts(&[(0.0, 0.0), (10.0, 10.0)], 0.0), [0.0; 2], "no room is none");
    }
}
