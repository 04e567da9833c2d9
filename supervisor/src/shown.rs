//! The content of the metrics listeners: the metrics, and the web page with its samples.

use std::collections::HashMap;
use std::sync::Arc;

use shadowslice_control::models::Served;
use shadowslice_datapath::trace::Tracer;
use shadowslice_ingress::{CertificateExpiry, Certificates, Events, File, Shown};
use shadowslice_operations::admin::AdminContext;
use shadowslice_operations::metrics;

/// The files of the web page.
const FILES: &[File] = &[
    File { path: "/", content_type: "text/html; charset=utf-8", text: include_str!("page/index.html") },
    File { path: "/page.css", content_type: "text/css; charset=utf-8", text: include_str!("page/page.css") },
    File { path: "/page.js", content_type: SCRIPT, text: include_str!("page/page.js") },
    File { path: "/charts.js", content_type: SCRIPT, text: include_str!("page/charts.js") },
];

const SCRIPT: &str = "text/javascript; charset=utf-8";

pub(crate) fn shown(
    reach: &Arc<AdminContext>,
    tracer: Option<Arc<Tracer>>,
    own: impl Fn() -> metrics::SupervisorMetrics + Send + Sync + 'static,
) -> Shown {
    let (reach, history) = (Arc::clone(reach), Arc::clone(&reach.history));
    Shown {
        metrics: Arc::new(move || rendered(&reach, tracer.as_deref(), own())),
        files: FILES,
        events: Arc::new(move || {
            let (kept, news) = history.follow();
            Events { kept, news }
        }),
    }
}

pub(crate) fn certificates(certificates: &Certificates) -> Vec<metrics::Certificate> {
    let of = |CertificateExpiry { file, kind, expires }| metrics::Certificate {
        file: file.display().to_string(),
        kind,
        expires,
    };
    certificates.expiries().into_iter().map(of).collect()
}

fn rendered(reach: &AdminContext, tracer: Option<&Tracer>, own: metrics::SupervisorMetrics) -> String {
    let status = reach.status();
    let mut statuses: HashMap<_, _> =
        status.models.into_iter().map(|model| (model.name.clone(), model)).collect();
    let models = reach.models();
    let told = |model: &Served| {
        let report = model.report.borrow();
        Some(metrics::ModelMetrics {
            status: statuses.remove(&model.shown_name())?,
            totals: model.pipeline.totals(),
            changes: report.changes.clone(),
            waits: report.waits.clone(),
        })
    };
    let shown: Vec<_> = models.served.iter().filter_map(told).collect();
    let policy = reach.planned.as_ref().map(|planned| planned.borrow().clone());
    let own = metrics::SupervisorMetrics { last_reload: models.last_reload, tenants: status.tenants, ..own };
    let traces = tracer.map(Tracer::counts);
    metrics::render(&shown, policy.as_ref(), traces, &status.gpus, &own)
}
