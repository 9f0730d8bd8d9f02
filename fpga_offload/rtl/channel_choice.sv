// SparQ's first step for one job: the channels with the largest sums of |q| over the query heads, and the
// queries of those, scaled: q * scale * sqrt(|q|_1 / |q of the chosen|_1).
//
// Sums over the heads go in their order, norms in the order of the channels, one number after another: the
// same numbers as the product's own kernels have.
`default_nettype none
module channel_choice #(parameter D = 128, parameter G = 1) (
    input  wire            clk,
    input  wire            rst,
    input  wire            start,
    input  wire            bf16,
    input  wire [31:0]     scale,
    input  wire [8:0]      keep,               // 1 to D channels
    input  wire            q_valid,            // beats behind start, all heads one after another
    input  wire [511:0]    q_data,
    output reg             done,               // pulse
    // of a chosen channel, by its place in their order, one cycle later: its number, and its queries
    input  wire [7:0]      channel_place,
    output reg  [7:0]      channel,
    input  wire [7:0]      place,
    output wire [32*G-1:0] reduced
);
    localparam NB = D / 32;
    localparam LD = $clog2(D);
    localparam ALL = G * D;
    localparam [3:0] IDLE = 0, QUERY = 1, SUM = 2, KEYS = 3, SELECT = 4, READ = 5, TERM = 6, ADD = 7, DIVIDE = 8,
        FACTOR = 9, FETCH = 10, MULTIPLY = 11, PRODUCT = 12;
    reg [3:0] state;

    // Queries as fp32. Beats wait, and are spread one number a cycle.
    reg [511:0] beats [0:G*NB-1];
    reg [11:0] beats_in, at;
    wire [511:0] beat = beats[at[11:5]];
    wire [18:0] wide;
    stored_to_wide convert(.bf16(bf16), .x(beat[16*at[4:0] +: 16]), .y(wide));
    wire [31:0] spread = {wide, 13'd0};
    reg [31:0] queries [0:ALL-1];
    reg [31:0] query;
    reg [3:0] head;
    reg [8:0] step;                            // channel, or place among the chosen
    reg over_chosen;
    reg [LD-1:0] chosen [0:D-1];
    wire [LD-1:0] step_channel = over_chosen ? chosen[step[LD-1:0]] : step[LD-1:0];
    always @(posedge clk) begin
        if (q_valid) beats[beats_in] <= q_data;
        if (state == SUM && at < ALL) queries[at] <= spread;
        query <= queries[head * D + step_channel];
        channel <= {{(8-LD){1'b0}}, chosen[channel_place[LD-1:0]]};
    end

    // Sums of |q| by channel: a sum is taken up again D cycles later.
    reg [31:0] sums [0:D-1];
    reg add_valid;
    reg [31:0] add_a, add_b, norm, whole, factor;
    wire add_done;
    wire [31:0] add_y;
    reg [11:0] summed;
    add_single adder(.clk(clk), .rst(rst), .in_valid(add_valid), .a(add_a), .b(add_b), .out_valid(add_done),
        .y(add_y));

    reg select_start, load_end, key_valid;
    reg [31:0] key;
    wire select_ready, take_valid, take, select_done;
    reg [LD-1:0] take_channel;
    reg [8:0] taken;
    argtopk #(.LN(LD)) select(.clk(clk), .rst(rst), .start(select_start), .ready(select_ready),
        .key_valid(key_valid), .key(key), .load_end(load_end), .keep(keep[LD:0]), .out_valid(take_valid),
        .out_take(take), .done(select_done));

    reg divide_valid, multiply_valid;
    reg [31:0] mul_a, mul_b;
    wire quotient_valid, root_valid, product_valid, divide_error, root_error;
    wire [31:0] quotient, root, product;
    zkf_divsqrt #(.WEXP(8), .WMAN(24), .MODE(0), .STAGE_INPUT(1), .STAGE_OUTPUT(1)) divider(.clk(clk), .rst(rst),
        .in_valid(divide_valid), .op_sqrt(1'b0), .a(whole), .b(norm), .out_valid(quotient_valid), .y(quotient),
        .error(divide_error));
    zkf_divsqrt #(.WEXP(8), .WMAN(24), .MODE(1), .STAGE_INPUT(1), .STAGE_OUTPUT(1)) rooter(.clk(clk), .rst(rst),
        .in_valid(quotient_valid), .op_sqrt(1'b1), .a(quotient), .b(32'd0), .out_valid(root_valid), .y(root),
        .error(root_error));
    zkf_mul #(.WEXP(8), .WMAN(24), .STAGE_PRODUCT(1), .STAGE_PACK(1), .STAGE_OUTPUT(1)) multiplier(.clk(clk),
        .rst(rst), .in_valid(multiply_valid), .a(mul_a), .b(mul_b), .out_valid(product_valid), .y(product));
    genvar g;
    generate for (g = 0; g < G; g = g + 1) begin : heads
        reg [31:0] values [0:D-1];
        reg [31:0] value;
        always @(posedge clk) begin
            if (state == PRODUCT && product_valid && head == g) values[step[LD-1:0]] <= product;
            value <= values[place[LD-1:0]];
        end
        assign reduced[32*g +: 32] = value;
    end endgenerate

    wire step_last = step + 9'd1 == (over_chosen ? keep : D);
    always @(posedge clk) begin
        done <= 0;
        select_start <= 0;
        load_end <= 0;
        key_valid <= 0;
        add_valid <= 0;
        divide_valid <= 0;
        multiply_valid <= 0;
        if (rst) state <= IDLE;
        else case (state)
            IDLE: begin
                beats_in <= 0;
                at <= 0;
                summed <= 0;
                taken <= 0;
                take_channel <= 0;
                if (start) state <= QUERY;
            end
            QUERY: begin
                if (q_valid) beats_in <= beats_in + 12'd1;
                if (beats_in == G * NB) begin
                    state <= SUM;
                    select_start <= 1;
                end
            end
            SUM: begin
                if (at < ALL) begin
                    at <= at + 12'd1;
                    add_valid <= 1;
                    add_a <= {1'b0, spread[30:0]};
                    add_b <= at < D ? 32'd0 : sums[at[LD-1:0]];
                end
                if (add_done) begin
                    sums[summed[LD-1:0]] <= add_y;
                    summed <= summed + 12'd1;
                    if (summed == ALL - 1) begin
                        state <= KEYS;
                        at <= 0;
                    end
                end
            end
            KEYS: if (select_ready) begin
                at <= at + 12'd1;
                key_valid <= at < D;
                key <= {1'b1, sums[at[LD-1:0]][30:0]};
                if (at == D) begin
                    load_end <= 1;
                    state <= SELECT;
                end
            end
            SELECT: begin
                if (take_valid) begin
                    take_channel <= take_channel + 1'b1;
                    if (take) begin
                        chosen[taken[LD-1:0]] <= take_channel;
                        taken <= taken + 9'd1;
                    end
                end
                head <= 0;
                step <= 0;
                norm <= 0;
                over_chosen <= 0;
                if (select_done) state <= READ;
            end
            // Norms: of all channels, then of the chosen.
            READ: state <= TERM;
            TERM: begin
                state <= ADD;
                add_valid <= 1;
                add_a <= norm;
                add_b <= {1'b0, query[30:0]};
            end
            ADD: if (add_done) begin
                norm <= add_y;
                state <= READ;
                step <= step_last ? 9'd0 : step + 9'd1;
                if (step_last && !over_chosen) begin
                    whole <= add_y;
                    norm <= 0;
                    over_chosen <= 1;
                end else if (step_last) state <= DIVIDE;
            end
            DIVIDE: begin
                state <= FACTOR;
                // All channels, or only zeros: nothing to correct for.
                if (keep == D || norm[30:23] == 0) begin
                    multiply_valid <= 1;
                    mul_a <= scale;
                    mul_b <= 32'h3f800000;
                end else divide_valid <= 1;
            end
            FACTOR: begin
                multiply_valid <= root_valid;
                if (root_valid) begin
                    mul_a <= scale;
                    mul_b <= root;
                end
                if (product_valid) begin
                    factor <= product;
                    state <= FETCH;
                end
            end
            FETCH: state <= MULTIPLY;
            MULTIPLY: begin
                state <= PRODUCT;
                multiply_valid <= 1;
                mul_a <= query;
                mul_b <= factor;
            end
            PRODUCT: if (product_valid) begin
                state <= FETCH;
                step <= step_last ? 9'd0 : step + 9'd1;
                if (step_last) begin
                    norm <= 0;
                    over_chosen <= 0;
                    head <= head + 4'd1;
                    state <= READ;
                    if (head == G - 1) begin
                        state <= IDLE;
                        done <= 1;
                    end
                end
            end
            default: state <= IDLE;
        endcase
    end
endmodule
`default_nettype wire
