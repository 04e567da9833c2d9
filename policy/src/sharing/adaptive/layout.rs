//! From what the models of a GPU need to their caps.

/// Caps may sum up to this many times the GPU.
///
/// With caps in proportion to the needs, everybody has at least his need when all execute, whatever the
/// factor, and more when some do not. Twice the need is about all that a model can use before its queue
/// is empty anyway; more lets whoever executes waste SMs past his knee that others could use.
const OVERLAP: [f64; 5] = [2.0, 1.75, 1.5, 1.25, 1.0];

/// What a model claims, in SMs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Claim {
    /// 1 is the highest.
    pub(super) priority: u32,
    /// The least it may get.
    pub(super) min: u32,
    /// The most it can use, and may get.
    pub(super) limit: u32,
    /// The need that its demand makes now.
    pub(super) need: u32,
    /// The need that its peak may make again.
    pub(super) peak: u32,
}

/// What each is guaranteed when all execute. `need_at` says what a model needs for a part of its demand.
///
/// Classes are served by priority. One that does not fit is served the same part of everybody's demand,
/// as large as fits; the lower ones keep their minimum. What is left goes towards the peaks.
pub(super) fn guarantees(claims: &[Claim], gpu: u32, need_at: impl Fn(usize, f64) -> u32) -> Vec<u32> {
    let mut granted: Vec<u32> = claims.iter().map(|claim| claim.min).collect();
    let mut left = gpu.saturating_sub(granted.iter().sum());
    let mut priorities: Vec<u32> = claims.iter().map(|claim| claim.priority).collect();
    priorities.sort_unstable();
    priorities.dedup();
    for priority in priorities {
        let class: Vec<usize> =
            (0..claims.len()).filter(|&model| claims[model].priority == priority).collect();
        let above = |model: usize, need: u32| need.min(claims[model].limit).saturating_sub(claims[model].min);
        let whole: u32 = class.iter().map(|&model| above(model, claims[model].need)).sum();
        let part = if whole <= left {
            1.0
        } else {
            largest_part(&class, left, |model, part| above(model, need_at(model, part)))
        };
        for &model in &class {
            let need = if part < 1.0 { need_at(model, part) } else { claims[model].need };
            let more = above(model, need).min(left);
            granted[model] += more;
            left -= more;
        }
        if part < 1.0 {
            return granted;
        }
    }
    towards_peaks(claims, &mut granted, left);
    granted
}

/// The largest part of a class's demand whose needs fit into `room`.
fn largest_part(class: &[usize], room: u32, need: impl Fn(usize, f64) -> u32) -> f64 {
    let (mut fits, mut exceeds) = (0.0, 1.0);
    for _ in 0..6 {
        let middle = (fits + exceeds) / 2.0;
        let sum: u32 = class.iter().map(|&model| need(model, middle)).sum();
        if sum <= room { fits = middle } else { exceeds = middle }
    }
    fits
}

fn towards_peaks(claims: &[Claim], granted: &mut [u32], left: u32) {
    let lack = |claim: &Claim, granted: u32| claim.peak.min(claim.limit).saturating_sub(granted);
    let lacks: u32 = claims.iter().zip(&*granted).map(|(claim, &granted)| lack(claim, granted)).sum();
    let part = (f64::from(left) / f64::from(lacks.max(1))).min(1.0);
    for (claim, granted) in claims.iter().zip(granted) {
        *granted += (f64::from(lack(claim, *granted)) * part) as u32;
    }
}

/// Caps in proportion to the guarantees, and above them as far as nobody loses his.
pub(super) fn caps(claims: &[Claim], guarantees: &[u32], gpu: u32) -> Vec<u32> {
    let sum: u32 = guarantees.iter().sum();
    let scale = f64::from(gpu) / f64::from(sum.max(1));
    let at = |overlap: f64| -> Vec<u32> {
        let cap = |(claim, &granted): (&Claim, &u32)| {
            let limit = claim.limit.max(granted);
            even(f64::from(granted) * scale * overlap).min(limit).max(claim.min)
        };
        claims.iter().zip(guarantees).map(cap).collect()
    };
    let keeps = |caps: &[u32]| {
        let sum: u32 = caps.iter().sum();
        let fits = f64::from(gpu) / f64::from(sum.max(gpu));
        // A step of SMs is lost to rounding.
        caps.iter()
            .zip(guarantees)
            .all(|(&cap, &granted)| f64::from(cap) * fits >= f64::from(granted) * 0.95 - 2.0)
    };
    OVERLAP.into_iter().map(at).find(|caps| keeps(caps)).unwrap_or_else(|| at(1.0))
}

/// The nearest multiple of two.
fn even(sms: f64) -> u32 {
    ((sms / 2.0).round() as u32) * 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(priority: u32, need: u32) -> Claim {
        Claim { priority, min: 2, limit: 132, need, peak: need }
    }

    fn in_proportion(claims: &[Claim]) -> impl Fn(usize, f64) -> u32 {
        |model, part| (f64::from(claims[model].need) * part) as u32
    }

    #[test]
    fn what_fits_gets_its_need_and_caps_overlap() {
        let claims = [claim(1, 30), claim(2, 60)];
        let guarantees = guarantees(&claims, 132, in_proportion(&claims));
        assert_eq!(guarantees, [30, 60]);
        assert_eq!(caps(&claims, &guarantees, 132), [88, 132]);
    }

    #[test]
    fn what_does_not_fit_is_degraded_by_priority_and_within_a_class_alike() {
        let claims = [claim(2, 100), claim(1, 80), claim(2, 100), claim(3, 40)];
        let guarantees = guarantees(&claims, 132, in_proportion(&claims));
        assert_eq!(guarantees[1], 80);
        assert_eq!(guarantees[3], 2);
        assert!(guarantees[0].abs_diff(guarantees[2]) <= 1 && guarantees.iter().sum::<u32>() <= 132);
    }

    #[test]
    fn what_is_left_goes_to_those_who_peaked() {
        let claims = [Claim { peak: 90, ..claim(1, 30) }, claim(1, 60)];
        assert_eq!(guarantees(&claims, 132, in_proportion(&claims)), [72, 60]);
    }

    #[test]
    fn a_low_limit_takes_no_guarantee_from_anybody() {
        let claims = [Claim { limit: 20, ..claim(1, 20) }, claim(1, 100)];
        let guarantees = guarantees(&claims, 132, in_proportion(&claims));
        let caps = caps(&claims, &guarantees, 132);
        let fits = 132.0 / f64::from(caps.iter().sum::<u32>()).max(132.0);
        assert!(f64::from(caps[0]) * fits >= 17.0, "{caps:?}");
    }
}
