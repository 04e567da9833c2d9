//! An inference as gRPC carries it: its message read, and its answer written.

use std::sync::Arc;

use shadowslice_datapath::pipeline::Metadata;
use shadowslice_datapath::router::Route;
use shadowslice_datapath::trace::Journal;

use crate::Frontend;
use crate::admission::budgets::Taken;
use crate::admission::memory_permit::Reserved;
use crate::admission::request_error::{RequestError, away};
use crate::api::model;
use crate::api::model::Answered;
use crate::proto::model_infer_response::InferOutputTensor;
use crate::proto::{ModelInferRequest, ModelInferResponse};
use crate::tensors::check::InferRequest;
use crate::tensors::codec::in_turn;
use crate::tensors::contents;

/// A request, read.
pub(crate) struct Inference {
    pub(crate) name: String,
    pub(crate) route: Route,
    pub(crate) metadata: Arc<Metadata>,
    pub(crate) request: InferRequest,
    /// Among the requests in flight.
    pub(crate) _place: Taken,
}

pub(crate) async fn inference(
    front: &Frontend,
    request: ModelInferRequest,
    journal: Option<&Journal>,
    reserved: &Reserved,
) -> Result<Inference, RequestError> {
    let name = request.model_name.clone();
    let route = model::find(&front.router, &name, &request.model_version)?;
    if let Some(journal) = journal {
        journal.set_model(&name);
        journal.set_id(&request.id);
    }
    let metadata = route.metadata_or_refuse(journal)?;
    let _place = reserved.client().admit().inspect_err(|_| route.count_host_refusal(journal))?;
    let request = match contents::is_quick(&request) {
        true => contents::request(request),
        false => away("reading the tensors", move || in_turn(|| contents::request(request))).await,
    };
    let request = model::count_malformed(&route, request.map_err(RequestError::from))?;
    Ok(Inference { name, route, metadata, request, _place })
}

pub(crate) fn response(model: String, id: String, outputs: Vec<Answered>) -> ModelInferResponse {
    let mut response = ModelInferResponse {
        model_name: model,
        model_version: model::VERSION.to_owned(),
        id,
        ..Default::default()
    };
    for output in outputs {
        response.outputs.push(InferOutputTensor {
            name: output.name,
            datatype: output.datatype.name().to_owned(),
            shape: output.shape,
            ..Default::default()
        });
        response.raw_output_contents.push(output.data);
    }
    response
}
