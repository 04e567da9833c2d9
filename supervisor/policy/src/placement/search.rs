//! A depth-first search for a placement. The search places one copy after the other, starting with the
//! copies that are hardest to place. For each copy, it tries the most promising GPU first. The search
//! skips branches that cannot cost less than the best placement so far.

use std::cmp::Reverse;

use shadowslice_shared::units::Sms;

use super::{Cost, GpuCapacity, MissingCopies, ModelCopies, Objective, Placement, Share, Shortage};

/// The maximum number of attempts to place a copy on a GPU. After this number of attempts, the search
/// returns the best placement so far.
const MAX_TRIALS: u32 = 200_000;

/// The total bandwidth of a GPU in integer units. Unlike a sum of floats, an integer sum does not
/// depend on the order of the addends.
const WHOLE_BANDWIDTH: u64 = 100_000_000;

/// Returns the cheapest placement of the models that a bounded search finds.
pub fn place(gpus: &[GpuCapacity], models: &[ModelCopies], objective: Objective) -> Placement {
    let copies = order(gpus, models);
    let levels = copies.last().map_or(0, |copy| copy.level + 1);
    let largest_sms = gpus.iter().map(|gpu| gpu.sms).max().unwrap_or(Sms(0));
    let mut search = Search {
        gpus,
        models,
        objective,
        largest_sms,
        taken: gpus.iter().map(PackedGpu::of).collect(),
        placed: vec![Vec::new(); models.len()],
        cost: Cost {
            missing: vec![0; levels],
            load_spread: load_spread(gpus, largest_sms, objective),
            ..Cost::default()
        },
        best: None,
        trials: 0,
        copies,
    };
    search.from(0);
    let is_best = search.trials < MAX_TRIALS;
    let (cost, mut placed) = search.best.take().unwrap_or_default();
    placed.iter_mut().for_each(|on| on.sort_unstable());
    let missing = missing(gpus, models, &placed);
    Placement { models: placed, missing, cost, is_best }
}

/// A copy to place.
#[derive(Debug, Clone, Copy)]
struct Copy {
    model: usize,
    /// The index of the copy in [`Cost::missing`].
    level: usize,
}

/// Returns the copies in the order in which the search places them. First copies come before second
/// copies, and higher priorities before lower priorities. Among copies of equal rank and priority, the
/// copies that need the largest fraction of a GPU come first.
fn order(gpus: &[GpuCapacity], models: &[ModelCopies]) -> Vec<Copy> {
    let largest = |of: fn(&GpuCapacity) -> u64| gpus.iter().map(of).max().unwrap_or(0).max(1);
    let (sms, memory) = (largest(|gpu| gpu.sms.0.into()), largest(|gpu| gpu.memory));
    let fills = |model: &ModelCopies| {
        let part = |needed: u64, of: u64| u128::from(needed) * u128::from(WHOLE_BANDWIDTH) / u128::from(of);
        part(model.each.sms.0.into(), sms)
            .max(part(model.each.memory, memory))
            .max(u128::from(bandwidth(&model.each)))
    };
    let of = |(index, model): (usize, &ModelCopies)| {
        let key = (model.priority, Reverse(fills(model)));
        (0..model.copies).map(move |number| ((number, key), index))
    };
    let mut all: Vec<_> = models.iter().enumerate().flat_map(of).collect();
    all.sort_unstable();
    let mut copies: Vec<Copy> = Vec::with_capacity(all.len());
    let mut last = None;
    for ((number, (priority, _)), model) in all {
        let level = copies.last().map_or(0, |copy| copy.level);
        let level = if last.is_some_and(|last| last != (number, priority)) { level + 1 } else { level };
        last = Some((number, priority));
        copies.push(Copy { model, level });
    }
    copies
}

/// The resources that models use on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct PackedGpu {
    models: u32,
    sms: u32,
    memory: u64,
    /// The memory of the largest shadow, in bytes.
    shadow: u64,
    bandwidth: u64,
}

impl PackedGpu {
    /// Returns the resources that models outside the placement use on this GPU.
    fn of(gpu: &GpuCapacity) -> Self {
        Self { models: 0, ..Self::default().with(&gpu.taken) }
    }

    fn free(&self, gpu: &GpuCapacity) -> u32 {
        gpu.sms.0.saturating_sub(self.sms)
    }

    fn with(self, each: &Share) -> Self {
        Self {
            models: self.models + 1,
            sms: self.sms.saturating_add(each.sms.0),
            memory: self.memory.saturating_add(each.memory),
            shadow: self.shadow.max(each.shadow),
            bandwidth: self.bandwidth.saturating_add(bandwidth(each)),
        }
    }

    fn fits(&self, gpu: &GpuCapacity) -> bool {
        self.sms <= gpu.sms.0
            && self.memory.saturating_add(self.shadow) <= gpu.memory
            && self.bandwidth <= WHOLE_BANDWIDTH
    }
}

fn bandwidth(each: &Share) -> u64 {
    (each.bandwidth.clamp(0.0, 1.0) * WHOLE_BANDWIDTH as f64).round() as u64
}

/// Returns the imbalance of the GPUs before any copy is placed.
fn load_spread(gpus: &[GpuCapacity], largest_sms: Sms, objective: Objective) -> u64 {
    match objective {
        Objective::FewGpus => 0,
        Objective::FewMoves => {
            gpus.iter().map(|gpu| square(largest_sms.0 - PackedGpu::of(gpu).free(gpu))).sum()
        }
    }
}

fn square(sms: u32) -> u64 {
    u64::from(sms) * u64::from(sms)
}

/// The state of the search.
struct Search<'a> {
    gpus: &'a [GpuCapacity],
    models: &'a [ModelCopies],
    objective: Objective,
    /// The number of SMs of the largest GPU.
    largest_sms: Sms,
    copies: Vec<Copy>,
    /// The used resources of each GPU.
    taken: Vec<PackedGpu>,
    /// The indices of each model's GPUs.
    placed: Vec<Vec<usize>>,
    cost: Cost,
    best: Option<(Cost, Vec<Vec<usize>>)>,
    trials: u32,
}

impl Search<'_> {
    /// Places all copies from index `at` on.
    fn from(&mut self, at: usize) {
        if self.best.as_ref().is_some_and(|(best, _)| self.at_least(at) >= *best) {
            return;
        }
        let Some(&Copy { model, level }) = self.copies.get(at) else {
            self.best = Some((self.cost.clone(), self.placed.clone()));
            return;
        };
        for gpu in self.choices(model) {
            if self.trials >= MAX_TRIALS {
                return;
            }
            self.trials += 1;
            let (taken, cost) = (self.taken[gpu], self.cost.clone());
            self.put(model, gpu);
            self.from(at + 1);
            self.placed[model].pop();
            (self.taken[gpu], self.cost) = (taken, cost);
        }
        self.cost.missing[level] += 1;
        self.from(at + 1);
        self.cost.missing[level] -= 1;
    }

    fn put(&mut self, model: usize, gpu: usize) {
        let ModelCopies { each, on, .. } = &self.models[model];
        self.cost.moves += u32::from(!on.is_empty() && !on.contains(&gpu));
        match self.objective {
            Objective::FewGpus => self.cost.gpus += u32::from(self.taken[gpu].models == 0),
            Objective::FewMoves => {
                let short = self.largest_sms.0 - self.free(gpu);
                self.cost.load_spread += square(short + each.sms.0) - square(short);
            }
        }
        self.taken[gpu] = self.taken[gpu].with(each);
        self.placed[model].push(gpu);
    }

    /// Returns the number of SMs of a GPU that no model uses.
    fn free(&self, gpu: usize) -> u32 {
        self.taken[gpu].free(&self.gpus[gpu])
    }

    /// Returns a lower bound of the cost after all copies from index `at` on are placed.
    fn at_least(&self, at: usize) -> Cost {
        if self.objective == Objective::FewMoves {
            return self.cost.clone();
        }
        let free = |(taken, gpu): (&PackedGpu, &GpuCapacity)| match taken.models {
            0 => 0,
            _ => taken.free(gpu),
        };
        let free: u32 = self.taken.iter().zip(self.gpus).map(free).sum();
        let wanted = self.copies[at..].iter().map(|copy| self.models[copy.model].each.sms.0);
        let lacking = wanted.fold(0_u32, u32::saturating_add).saturating_sub(free);
        let largest = self.gpus.iter().map(|gpu| gpu.sms.0).max().unwrap_or(0).max(1);
        // This is a lower bound even if copies are missing. A missing copy needs no GPU, but it costs
        // more than any number of GPUs.
        let more = lacking.div_ceil(largest);
        Cost { gpus: self.cost.gpus + more, ..self.cost.clone() }
    }

    /// Returns the GPUs that can take a copy, with the most promising GPU first. If several GPUs are
    /// equivalent, returns only one of them.
    fn choices(&self, model: usize) -> Vec<usize> {
        let ModelCopies { each, on, .. } = &self.models[model];
        let hosts: Vec<usize> = self.placed[model].iter().map(|&gpu| self.gpus[gpu].host).collect();
        let fits = |&gpu: &usize| {
            !hosts.contains(&self.gpus[gpu].host) && self.taken[gpu].with(each).fits(&self.gpus[gpu])
        };
        let mut choices: Vec<usize> = (0..self.gpus.len()).filter(fits).collect();
        choices.sort_by_key(|&gpu| {
            let (empty, left) = match self.objective {
                Objective::FewGpus => (self.taken[gpu].models == 0, self.free(gpu)),
                Objective::FewMoves => (false, self.largest_sms.0 - self.free(gpu)),
            };
            (!on.contains(&gpu), empty, left, gpu)
        });
        let mut seen: Vec<usize> = Vec::new();
        choices.retain(|&gpu| {
            let is_new = !seen.iter().any(|&other| self.are_alike(gpu, other));
            if is_new {
                seen.push(gpu);
            }
            is_new
        });
        choices
    }

    /// Returns true if the two GPUs are equivalent for this copy and all later copies.
    fn are_alike(&self, one: usize, other: usize) -> bool {
        self.gpus[one] == self.gpus[other]
            && self.taken[one].models == 0
            && self.taken[other].models == 0
            && self.models.iter().all(|model| model.on.contains(&one) == model.on.contains(&other))
    }
}

fn missing(gpus: &[GpuCapacity], models: &[ModelCopies], placed: &[Vec<usize>]) -> Vec<MissingCopies> {
    let mut taken: Vec<PackedGpu> = gpus.iter().map(PackedGpu::of).collect();
    for (model, on) in models.iter().zip(placed) {
        on.iter().for_each(|&gpu| taken[gpu] = taken[gpu].with(&model.each));
    }
    let of = |(index, (model, on)): (usize, (&ModelCopies, &Vec<usize>))| {
        let copies = model.copies.saturating_sub(u32::try_from(on.len()).unwrap_or(u32::MAX));
        let has = |gpu: usize| on.iter().any(|&other| gpus[other].host == gpus[gpu].host);
        let others = || (0..gpus.len()).filter(|&gpu| !has(gpu)).map(|gpu| (&gpus[gpu], &taken[gpu]));
        (copies > 0).then(|| MissingCopies { model: index, copies, shortage: shortage(&model.each, others) })
    };
    models.iter().zip(placed).enumerate().filter_map(of).collect()
}

fn shortage<'a, I>(each: &Share, others: impl Fn() -> I) -> Shortage
where
    I: Iterator<Item = (&'a GpuCapacity, &'a PackedGpu)>,
{
    let free = |(gpu, taken): (&GpuCapacity, &PackedGpu)| taken.free(gpu);
    let Some(sms) = others().map(free).max() else { return Shortage::Host };
    if sms < each.sms.0 {
        return Shortage::Sms { free: Sms(sms), needed: each.sms };
    }
    let with_sms = others().filter(|&both| free(both) >= each.sms.0);
    let needed = each.memory.saturating_add(each.shadow);
    // Another model's shadow may be larger than this copy's shadow. The GPU needs room only for the
    // larger one.
    let room = |(gpu, taken): (&GpuCapacity, &PackedGpu)| {
        gpu.memory.saturating_sub(taken.memory.saturating_add(taken.shadow.saturating_sub(each.shadow)))
    };
    match with_sms.map(room).max() {
        Some(free) if free < needed => Shortage::Memory { free, needed },
        _ => Shortage::Bandwidth,
    }
}
