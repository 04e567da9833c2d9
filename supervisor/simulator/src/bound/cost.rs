//! The least that a request can cost.

use std::time::Duration;

use shadowslice_shared::profile::Execution;
use shadowslice_shared::units::Sms;

/// What [`Execution::time`] may be off by, rounding to whole nanoseconds.
const ROUNDING_NS: f64 = 0.5;

/// The least that a request of a model can cost if it is answered in time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// SM·ns of its GPU.
    pub sm_ns: f64,
    /// Time of its lane.
    pub lane_ns: f64,
}

/// The least that one request costs as part of a batch of up to `max_batch`, on up to `max` SMs,
/// executed within `slo`; nothing if that cannot be done.
///
/// SMs may be fractions here and may change while a batch executes, as they do under contention. With
/// g(S) = 1/t(b, S), the speed of a batch, a batch that takes T on S SMs on average does at most
/// T·G(S) of its work, G being the concave envelope of g, so that S ≥ G⁻¹(1/T), and S·T is least at
/// the longest T allowed, the SLO. Between two columns t is linear, so g is convex and its envelope
/// the chord; below the first one g is proportional to S. G is therefore the upper hull of the origin
/// and the columns.
pub fn cheapest(execution: &Execution, max_batch: u32, max: Sms, slo: Duration) -> Option<Cost> {
    let slo = slo.as_nanos() as f64;
    let columns: Vec<f64> = execution
        .sms()
        .iter()
        .filter(|&&sms| sms < max)
        .chain([&max])
        .filter(|sms| sms.0 > 0)
        .map(|sms| f64::from(sms.0))
        .collect();
    let of_batch = |batch: u32| {
        let speed = |&sms: &f64| {
            (sms, 1.0 / (execution.time(batch, sms).as_nanos() as f64 - ROUNDING_NS).max(ROUNDING_NS))
        };
        let points: Vec<(f64, f64)> = columns.iter().map(speed).collect();
        let sms = on_hull(&upper_hull(&points), 1.0 / slo)?;
        let fastest = points.iter().map(|point| point.1).fold(0.0, f64::max);
        let rows = f64::from(batch);
        Some(Cost { sm_ns: sms * slo / rows, lane_ns: 1.0 / (fastest * rows) })
    };
    // Beyond the last row time grows in proportion: larger batches save nothing and are late sooner.
    let largest = execution.rows().last().map_or(1, |row| row.batch).min(max_batch).max(1);
    (1..=largest)
        .filter_map(of_batch)
        .reduce(|a, b| Cost { sm_ns: a.sm_ns.min(b.sm_ns), lane_ns: a.lane_ns.min(b.lane_ns) })
}

/// The rising part of the upper hull of the origin and these points, which ascend.
fn upper_hull(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut hull = vec![(0.0, 0.0)];
    for &point in points {
        while let [.., a, b] = hull[..]
            && (b.1 - a.1) * (point.0 - a.0) <= (point.1 - a.1) * (b.0 - a.0)
        {
            hull.pop();
        }
        hull.push(point);
    }
    hull
}

/// Where the hull reaches this height, if it does.
fn on_hull(hull: &[(f64, f64)], height: f64) -> Option<f64> {
    let above = hull.iter().position(|point| point.1 >= height)?;
    let ((x0, y0), (x1, y1)) = (hull[above.checked_sub(1)?], hull[above]);
    Some(x0 + (x1 - x0) * (height - y0) / (y1 - y0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowslice_shared::profile::Row;

    fn cost(rows: &[(u32, [f64; 2])], max_batch: u32, max: u32, slo_ms: u64) -> Option<(f64, f64)> {
        let rows = rows.iter().map(|(batch, ms)| Row { batch: *batch, ms: ms.to_vec() }).collect();
        let execution = Execution::new(vec![Sms(10), Sms(40)], rows).unwrap();
        cheapest(&execution, max_batch, Sms(max), Duration::from_millis(slo_ms))
            .map(|cost| ((cost.sm_ns / 1e4).round() / 1e2, (cost.lane_ns / 1e4).round() / 1e2))
    }

    #[test]
    fn the_cheapest_batch_and_share_within_the_slo() {
        let rows = [(1, [8.0, 4.0]), (4, [16.0, 8.0])];
        assert_eq!(cost(&rows, 4, 100, 16), Some((40.0, 2.0)), "four on 10 SMs in 16 ms");
        assert_eq!(cost(&rows, 1, 100, 100), Some((80.0, 4.0)), "one at a time");
        assert_eq!(cost(&rows, 4, 100, 8), Some((80.0, 2.0)), "in 8 ms: four on 40 SMs, one on 10");
        assert_eq!(cost(&rows, 4, 20, 3), None, "nothing that fast");
        assert_eq!(cost(&rows, 4, 40, 0), None, "no time at all");
        assert_eq!(cost(&rows, 4, 0, 100), None, "no SMs");
    }

    #[test]
    fn a_max_between_columns_counts() {
        let rows = [(1, [8.0, 2.0])];
        assert_eq!(cost(&rows, 1, 25, 100), Some((80.0, 5.0)));
        assert_eq!(cost(&rows, 1, 25, 4), None, "5 ms on 25 SMs");
    }
}
