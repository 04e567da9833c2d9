-- The name of the model that a gRPC call is about becomes a header, by which it is routed. What no
-- model can be called becomes none: in a header it would break the host's connection, or the call.
local EXTRACTED = "envoy.filters.http.grpc_field_extraction"
local HEADER = "x-shadowslice-model"
local LONGEST = 128 -- bytes

function envoy_on_request(handle)
  handle:headers():remove(HEADER)
  local extracted = handle:streamInfo():dynamicMetadata():get(EXTRACTED)
  local name = extracted and extracted["name"] and extracted["name"][1]
  if name and #name <= LONGEST and name:find("^[%w._-]+$") then
    handle:headers():add(HEADER, name)
  end
end
