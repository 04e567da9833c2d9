//! The assignment of groups of SMs to the models whose shares are partitions inside their workers.
//!
//! Every model gets contiguous groups. This keeps the number of different partitions small. A small
//! number matters because a worker creates the contexts of all its partitions before it serves. If the
//! models do not fit side by side, some partitions overlap. Each model shares as few groups as
//! possible, preferably with models of low priority. Among equally good placements, the module uses the
//! one that moves the fewest groups.

use shadowslice_shared::groups::Groups;

/// A model that needs groups of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupTenant {
    /// The number of groups that the model needs. If the GPU has no more groups than this number, the
    /// model gets the whole GPU. The placement of the other models then ignores this model.
    pub count: usize,
    /// The model's priority; 1 is the highest.
    pub priority: u32,
    /// The groups that the model has at present; [`Groups::WHOLE`] for a new model.
    pub now: Groups,
    /// The groups that a layout assigns to the model. Other models may have the same groups.
    pub preferred: Option<Groups>,
    /// The contiguous sets of groups that the model's worker cannot use.
    pub cannot: Vec<Groups>,
}

impl GroupTenant {
    /// Returns the preferred groups if their number equals `count` and the worker can use them.
    fn given(&self) -> Option<Groups> {
        self.preferred.filter(|groups| groups.count() == self.count && !self.cannot.contains(groups))
    }
}

/// The cost of a set of groups for a model. Costs are compared field by field, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    /// The number of groups shared with other models. A group counts once for each of these models.
    shared: usize,
    /// A number that increases with the highest priority among the models that share groups. It is 0 if
    /// no groups are shared.
    harm: u32,
    /// The number of groups that the model does not have at present.
    moved: usize,
    /// The distance from the nearer end of the GPU, in groups. A small distance keeps free groups
    /// contiguous.
    inside: usize,
}

/// The maximum number of attempts to reduce the overlaps of a new placement.
const ROUNDS: usize = 8;

/// Returns the groups of each model on a GPU with `total` groups. A model gets the whole GPU if its
/// worker can use no contiguous set of the right size. If the models already have the groups that a
/// call returned, a call with the same counts returns the same groups.
pub fn place(tenants: &[GroupTenant], total: usize) -> Vec<Groups> {
    let stays = |tenant: &GroupTenant| match (tenant.count < total, tenant.given()) {
        (true, Some(given)) => Some(given),
        (true, None) => {
            (tenant.now.count() == tenant.count && !tenant.cannot.contains(&tenant.now)).then_some(tenant.now)
        }
        (false, _) => Some(Groups::WHOLE),
    };
    let all_stay: Option<Vec<Groups>> = tenants.iter().map(stays).collect();
    let mut placed = all_stay.unwrap_or_else(|| place_in_turn(tenants, total));
    if tenants.iter().any(|tenant| tenant.given().is_some()) {
        // A layout may give several models the same groups, and this overlap must stay.
        return placed;
    }
    for _ in 0..ROUNDS {
        let moved: Vec<GroupTenant> =
            tenants.iter().zip(&placed).map(|(tenant, &now)| GroupTenant { now, ..tenant.clone() }).collect();
        let next = place_in_turn(&moved, total);
        if overlaps(&moved, &next) >= overlaps(&moved, &placed) {
            break;
        }
        placed = next;
    }
    // The free groups are not always contiguous, so models can overlap although all of them fit on the
    // GPU. A new placement side by side removes such overlaps.
    let parts = tenants.iter().filter(|tenant| tenant.count < total);
    let fit = parts.map(|tenant| tenant.count.max(1)).sum::<usize>() <= total;
    if !fit || overlaps(tenants, &placed).0 == 0 {
        return placed;
    }
    let adjacent = side_by_side(tenants, total);
    let possible = tenants.iter().zip(&adjacent).all(|(tenant, groups)| !tenant.cannot.contains(groups));
    if possible { adjacent } else { placed }
}

/// Places the models in the order of their priority, the highest first. Each model gets the set of
/// groups with the lowest cost.
fn place_in_turn(tenants: &[GroupTenant], total: usize) -> Vec<Groups> {
    let mut placed = vec![Groups::WHOLE; tenants.len()];
    let parts = (0..tenants.len()).filter(|&index| tenants[index].count < total);
    let (given, mut order): (Vec<usize>, Vec<usize>) =
        parts.partition(|&index| tenants[index].given().is_some());
    // Among equal priorities, models that have groups keep them, and new models get free groups.
    order.sort_by_key(|&index| (tenants[index].priority, tenants[index].now == Groups::WHOLE, index));
    let mut before: Vec<(Groups, u32)> = Vec::new();
    for (index, groups) in given.into_iter().filter_map(|index| Some((index, tenants[index].given()?))) {
        before.push((groups, tenants[index].priority));
        placed[index] = groups;
    }
    for index in order {
        let tenant = &tenants[index];
        let count = tenant.count.max(1);
        let runs = (0..=total - count).map(|start| (start..start + count).collect::<Groups>());
        let runs = runs.filter(|run| !tenant.cannot.contains(run));
        let cost = |run: &Groups| {
            let met = before.iter().filter(|(groups, _)| groups.common(*run) != Groups::NONE);
            Cost {
                shared: met.clone().map(|(groups, _)| groups.common(*run).count()).sum(),
                harm: met.map(|(_, priority)| u32::MAX - priority).max().unwrap_or(0),
                moved: count - run.common(tenant.now).count(),
                inside: first(*run).min(total - count - first(*run)),
            }
        };
        let run = runs.min_by_key(cost).unwrap_or(Groups::WHOLE);
        before.push((run, tenant.priority));
        placed[index] = run;
    }
    placed
}

/// Places the models in their present order without gaps, starting at the first group.
fn side_by_side(tenants: &[GroupTenant], total: usize) -> Vec<Groups> {
    let mut placed = vec![Groups::WHOLE; tenants.len()];
    let mut order: Vec<usize> = (0..tenants.len()).filter(|&index| tenants[index].count < total).collect();
    order.sort_by_key(|&index| {
        let now = tenants[index].now;
        (if now == Groups::WHOLE { total } else { first(now) }, index)
    });
    let mut start = 0;
    for index in order {
        let end = start + tenants[index].count.max(1);
        placed[index] = (start..end).collect();
        start = end;
    }
    placed
}

fn first(groups: Groups) -> usize {
    groups.iter().next().unwrap_or(0)
}

/// Returns the number of groups that pairs of models share. Also returns that number weighted by the
/// higher priority of each pair. A smaller result means a better placement. Ignores models with the
/// whole GPU.
fn overlaps(tenants: &[GroupTenant], placed: &[Groups]) -> (usize, u64) {
    let parts: Vec<(u32, Groups)> = tenants
        .iter()
        .map(|tenant| tenant.priority)
        .zip(placed.iter().copied())
        .filter(|(_, groups)| *groups != Groups::WHOLE)
        .collect();
    let pairs = parts.iter().enumerate().flat_map(|(at, one)| {
        parts[at + 1..].iter().map(|other| (one.1.common(other.1).count(), one.0.min(other.0)))
    });
    pairs.fold((0, 0), |(groups, harm), (shared, priority)| {
        (groups + shared, harm + shared as u64 * u64::from(u32::MAX - priority))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOTAL: usize = 16;

    fn run(from: usize, count: usize) -> Groups {
        (from..from + count).collect()
    }

    fn tenant(count: usize, priority: u32, now: Groups) -> GroupTenant {
        GroupTenant { count, priority, now, preferred: None, cannot: Vec::new() }
    }

    #[test]
    fn those_that_fit_share_nothing_and_stay_where_they_are() {
        let two = [tenant(5, 1, run(0, 5)), tenant(6, 1, Groups::WHOLE)];
        assert_eq!(place(&two, TOTAL), [run(0, 5), run(10, 6)]);
        let shrinks = [tenant(3, 1, run(0, 5)), tenant(6, 1, run(10, 6))];
        assert_eq!(place(&shrinks, TOTAL), [run(0, 3), run(10, 6)]);
        let grows = [tenant(9, 1, run(0, 5)), tenant(6, 1, run(10, 6))];
        assert_eq!(place(&grows, TOTAL), [run(0, 9), run(10, 6)]);
    }

    #[test]
    fn the_whole_gpu_is_nobodys_neighbour() {
        let models =
            [tenant(TOTAL, 1, run(3, 4)), tenant(4, 2, Groups::WHOLE), tenant(TOTAL, 3, Groups::WHOLE)];
        assert_eq!(place(&models, TOTAL), [Groups::WHOLE, run(0, 4), Groups::WHOLE]);
    }

    #[test]
    fn where_what_is_free_lies_apart_all_move_together() {
        let models = [tenant(4, 1, run(2, 4)), tenant(4, 1, run(8, 4)), tenant(8, 2, Groups::WHOLE)];
        assert_eq!(place(&models, TOTAL), [run(0, 4), run(4, 4), run(8, 8)]);
    }

    #[test]
    fn what_does_not_fit_overlaps_with_the_lowest_priority() {
        let models = [tenant(6, 1, run(0, 6)), tenant(6, 3, run(10, 6)), tenant(6, 2, Groups::WHOLE)];
        let placed = place(&models, TOTAL);
        assert_eq!(placed[0], run(0, 6));
        assert_eq!(
            placed[0].common(placed[2]),
            Groups::NONE,
            "the second priority does not overlap with the first"
        );
        assert_eq!(placed[2].common(placed[1]).count(), 2);
        assert_eq!(placed[0].common(placed[1]), Groups::NONE, "the third overlaps with the second alone");
    }

    #[test]
    fn what_a_model_cannot_have_it_is_not_given() {
        let mut picky = tenant(4, 1, Groups::WHOLE);
        picky.cannot = vec![run(0, 4), run(12, 4)];
        let placed = place(&[picky.clone(), tenant(12, 1, Groups::WHOLE)], TOTAL);
        assert!(!picky.cannot.contains(&placed[0]) && placed[0].count() == 4, "{}", placed[0]);
        picky.cannot = (0..=12).map(|start| run(start, 4)).collect();
        assert_eq!(place(&[picky], TOTAL), [Groups::WHOLE]);
    }

    #[test]
    fn a_layout_says_which_groups_and_the_others_go_where_they_meet_fewest() {
        let mut models = vec![tenant(8, 1, Groups::WHOLE); 2];
        models[0].preferred = Some(run(4, 8));
        models[1].preferred = Some(run(4, 8));
        models.push(tenant(4, 2, Groups::WHOLE));
        assert_eq!(place(&models, TOTAL), [run(4, 8), run(4, 8), run(0, 4)]);
        models[1].count = 6;
        assert_ne!(place(&models, TOTAL)[1], run(4, 8), "another share has other groups");
        models[0].cannot = vec![run(4, 8)];
        assert_ne!(place(&models, TOTAL)[0], run(4, 8));
    }

    /// Tests random mixes of up to four models on a small GPU. Each round starts from the placement of
    /// the previous round.
    #[test]
    fn whatever_is_asked_for_each_gets_as_many_and_no_two_meet_that_fit() {
        let total = 6;
        let mut now = [Groups::WHOLE; 4];
        let mut seed = 1_u64;
        let mut draw = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for round in 0..20_000 {
            let tenants: Vec<GroupTenant> = (0..1 + draw(4) as usize)
                .map(|at| tenant(1 + draw(6) as usize, 1 + draw(3) as u32, now[at]))
                .collect();
            let placed = place(&tenants, total);
            let wanted: usize =
                tenants.iter().map(|tenant| tenant.count).filter(|&count| count < total).sum();
            for (tenant, &groups) in tenants.iter().zip(&placed) {
                let whole = tenant.count >= total;
                assert!(if whole { groups == Groups::WHOLE } else { groups.count() == tenant.count });
                assert!(whole || groups.iter().all(|group| group < total), "{groups}");
            }
            if wanted <= total {
                assert_eq!(overlaps(&tenants, &placed).0, 0, "round {round}: {tenants:?} {placed:?}");
            }
            let again: Vec<GroupTenant> = tenants
                .iter()
                .zip(&placed)
                .map(|(tenant, &now)| GroupTenant { now, ..tenant.clone() })
                .collect();
            assert_eq!(
                place(&again, total),
                placed,
                "round {round}: a second call moves nothing: {tenants:?}"
            );
            now[..placed.len()].copy_from_slice(&placed);
        }
    }
}
